"""The contract of training on a mesh, in two forms, the check that a target meets one of them, and the family."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.mesh.decoder import Batch
from impl.mesh.trainer import MeshTrainer
from shardmark.api import Family, Refusable, RegistryError, add_family


class Trainer(Protocol):
    """`make(model_fn, optimizer_fn, mesh, *, max_norm=1.0)`, for a step of one's own; or `parallelize(model, mesh)`,
    which returns the model, and the suite's own step is put around it (`impl.mesh.trainer`). `mesh` is a `DeviceMesh`
    whose axes are among `pp`, `dp`, `shard`, `cp` and `tp` (`shardmark.api.mesh` says what each does with a batch),
    with `ep` as one more name; in any order, some with one rank, and on some of the world's ranks if it is a slice of
    a larger one. Either may refuse a mesh as `Unsupported`.

    Must, of either form:

    - Training is that of one process with the whole batch: losses, norms, gradients and parameters, in float64 to
      1e-12 at the first step, and after 20, in float32 to 1e-4, with an optimizer that updates each element by itself.
      A step's loss is the sum of its targets' cross entropies over all ranks and micro-batches, divided by the number
      of targets, leaving out those that are -100: a rank may have no others in a whole step.
    - Ranks that have the same parameter, or the same part of it, have it bitwise equal.
    - Frozen parameters keep their values, tied ones stay one, and one without a gradient has none, or zeros.
    - Saved after a step and loaded into another one, which may have taken steps, or the same one, training goes on as
      if it had not ended.
    - `optimizer_fn` makes the optimizers that step: options that the caller changes in their groups, as a schedule
      does, hold from the next step on. No call changes the caller's random state.

    Must, of `parallelize`: it is called on every rank with the same whole model, and returns a module that is called as
    the model is, with this rank's part of a batch. Its parameters are DTensors, or whole on every rank, under the
    model's own names (PyTorch's wrappers may put theirs before). After a backward pass, and after
    `finish_gradient_synchronization()` if the module has it, each gradient is the average over the ranks with tokens of
    their own (along dp, shard, cp), and ranks agree on which there are. Gradients of a pass in `no_sync()`, or after
    `set_requires_gradient_sync(False)`, may stay on their rank until the next pass without. Forward passes may come
    without a backward pass, also under `torch.inference_mode()`, or several before one.

    Must, of `make`: gradients are clipped to `max_norm` by their 2-norm, in which every parameter counts once, as
    `torch.nn.utils.clip_grad_norm_` does; a step whose norm is not finite changes nothing on any rank.
    """

    def step(self, batches: Sequence[Batch]) -> tuple[float | Tensor, float | Tensor]:
        """Train on this rank's part of each micro-batch: (tokens, positions, targets), each (rows, context) int64, of
        sizes that may differ from one to the next, and left as they are. Positions may begin at any number, and again
        within a row.
        Returns the loss and the norm before clipping, the same on every rank, as numbers, or tensors of one element
        without a graph, that later steps do not change."""
        ...

    def full_parameters(self) -> Mapping[str, Tensor]:
        """Every parameter, whole, by the model's own name, on every rank. All ranks call."""
        ...

    def full_gradients(self) -> Mapping[str, Tensor]:
        """The gradients that the last step's optimizer had, whole, in the same way; zeros, or none, for a parameter
        without one."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """This rank's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that the same rank of the same mesh has saved."""
        ...


Make = Callable[..., Trainer]


def makes_trainer(target: Any) -> bool:
    """Whether it is `make(model_fn, optimizer_fn, mesh, *, max_norm)`, and not `parallelize(model, mesh)`: it has a
    parameter `max_norm`, or three without a default, or is a class of trainers."""
    parameters = inspect.signature(target).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in positional and p.default is inspect.Parameter.empty]
    of_trainers = inspect.isclass(target) and not issubclass(target, nn.Module)
    return "max_norm" in parameters or len(needed) >= 3 or of_trainers


def adapted(target: Any) -> Make:
    """The target as `make`."""
    return target if makes_trainer(target) else partial(MeshTrainer, target)


def _check(target: Any, device: str) -> None:
    """Check the signature; correctness tests check the rest."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; it is parallelize(model, mesh) or a trainer's make")
    signature = inspect.signature(target)
    try:
        if makes_trainer(target):
            signature.bind(None, None, None, max_norm=1.0)
        else:
            signature.bind(None, None)
    except TypeError:
        raise RegistryError(
            f"it is called as {signature}, and not as (model, mesh) or (model_fn, optimizer_fn, mesh, *, max_norm=1.0)"
        ) from None


def _axes(mesh: DeviceMesh) -> str:
    return ",".join(f"{name}={mesh.size(dim)}" for dim, name in enumerate(mesh.mesh_dim_names or ()))


FAMILY = add_family(
    Family(
        "mesh",
        Trainer,
        reference="naive",
        check=_check,
        adapt=adapted,
        may_refuse=(Refusable("meshes", lambda model_fn, optimizer_fn, mesh, **_: _axes(mesh)),),
    )
)
