"""The contract of fully sharded data parallelism, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn

from impl.fsdp.accounting import sharded_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class FullySharded(Protocol):
    """`FullyShardedDataParallel(module, *, process_group=None, compute_dtype=None, reduce_dtype=None, ...)`.

    Wrapping gives every rank rank 0's parameters and buffers. It raises ValueError for a module with no trainable
    parameter, for one that is sharded already, and, on every rank, when the ranks' modules differ; that error names the
    first parameter that does. From then on `parameters()` are this rank's shards, in the parameters' own dtype, and any
    optimizer takes them; some may be empty. After `finish_gradient_synchronization`, between backward and
    `optimizer.step()`, the `.grad` of each trainable shard has the shard's shape and dtype and is this rank's part of
    the gradient averaged over the ranks. A gradient that a rank does not have counts as zero; gradients of several
    backward passes add up; frozen parameters have none. `isinstance` says the same of each module as before.

    Every rank must run the same units in the same order, in forward and in backward. A parameter may be read only while
    the forward of its own unit, or of a unit around it, runs.
    """

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def finish_gradient_synchronization(self) -> None:
        """Return when every shard has its part of the averaged gradient."""
        ...

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every full parameter in its own dtype, by its name in the module; a tied one by each name. All ranks call."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. All ranks call.

        Returns the norm before that, as `torch.nn.utils.clip_grad_norm_` does.
        """
        ...


def _check(target: Any, device: str) -> None:
    """Check what can be checked without ranks: the signature and the methods. Correctness tests check the rest."""
    try:
        inspect.signature(target).bind(nn.Linear(1, 1), process_group=None, compute_dtype=None, reduce_dtype=None)
    except TypeError as error:
        raise RegistryError(
            f"it is called as Wrapper(module, *, process_group=None, compute_dtype=None, reduce_dtype=None): {error}"
        ) from None
    for method in ("finish_gradient_synchronization", "gather_full_parameters"):
        if not callable(getattr(target, method, None)):
            raise RegistryError(f"it has no method {method}()")


FAMILY = add_family(
    Family(
        "fsdp",
        FullySharded,
        reference="sharded_plain",
        check=_check,
        memory=sharded_peak,
        time=Race("fsdp2", budget=2.0),
    )
)
