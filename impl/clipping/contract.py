"""The contract of clipping gradients on a mesh, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmark.api import Family, Refusable, RegistryError, add_family


class Clip(Protocol):
    """`clip(parameters, max_norm, norm_type=2.0) -> norm`, in place, as `torch.nn.utils.clip_grad_norm_`; a class
    of which one is made without arguments will do. All ranks call.

    Gradients are DTensors, of any placements (`_StridedShard` too, as FSDP2 gives them where tensor parallelism has cut
    before) and on any meshes of the ranks, or tensors that every rank has whole, as many and as large as they may be.
    Complex ones count with their absolute values, or are an error. Parameters whose `.grad` is None, on all ranks
    that have a part of them, are left out; they may be others in each call.

    Must:

    - The norm is that of all gradients before clipping, each counted once: of type 1 or more, or infinity. It is
      returned whole, as a tensor () or a DTensor of one, which later calls leave as it is, and is the same to the bit
      on every rank.
    - Gradients are scaled by `max_norm / (norm + 1e-6)` where that is below 1, and otherwise keep their bits. All may
      be zeros, and `max_norm` may be 0 or infinity.
    - A gradient that is not finite gives a norm that is not, on every rank.
    - The relative error is a few roundings in the gradients' dtype, also under the caller's autocast and in any default
      dtype, and the norm of float16 gradients does not overflow.

    Should: memory beside the gradients does not grow with their size.
    """

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor: ...


def adapted(target: Any) -> Clip:
    """The function; of a class, an object that is called as one."""
    return cast(Clip, target() if inspect.isclass(target) else target)


def _check(target: Any, device: str) -> None:
    """Check the signature; correctness tests check the rest."""
    target = adapted(target)
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable")
    try:
        inspect.signature(target).bind([], 1.0, norm_type=2.0)
    except TypeError as error:
        raise RegistryError(f"it is not called as clip(parameters, max_norm, norm_type=2.0): {error}") from None


def _meshes(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> str | None:
    """Names of the meshes of gradients, where they are several; a tensor that is none is on no mesh."""
    meshes = {
        ",".join(p.grad.device_mesh.mesh_dim_names or ()) if isinstance(p.grad, DTensor) else "none"
        for p in parameters
        if p.grad is not None
    }
    return " and ".join(sorted(meshes)) if len(meshes) > 1 else None


FAMILY = add_family(
    Family(
        "clipping",
        Clip,
        reference="gathered",
        check=_check,
        adapt=adapted,
        may_refuse=(Refusable("gradients on meshes", _meshes),),
    )
)
