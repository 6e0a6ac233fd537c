"""A training step on a mesh, around any `parallelize(model, mesh)`.

    trainer = MeshTrainer(parallelize, model_fn, optimizer_fn, mesh, max_norm=1.0)
    loss, norm = trainer.step(micro_batches)

Micro-batches and ranks may differ in their numbers of tokens: each token of a step has the same weight. Gradients of
micro-batches are added where they are, and averaged over the ranks once. A step whose norm is not finite is left out,
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from impl.clipping import scale_, total_norm, whole_gradients
from impl.distributed import full
from impl.mesh.objective import TOKENS, Objective
from shardmark.api import data_axes

Named = Sequence[tuple[str, nn.Parameter]]

_OF_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of names that PyTorch's wrappers add."""


def without_wrappers(name: str) -> str:
    """The name without the parts that PyTorch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


class OwnNames:
    """The names that parameters have in the model itself, whatever wrappers add; a model's own may have such parts."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {name for name, _ in model.named_parameters()}
        self._by_rest = {without_wrappers(name): name for name in self._own}

    def __getitem__(self, name: str) -> str:
        rest = without_wrappers(name)
        return name if name in self._own else self._by_rest.get(rest, rest)


def by_mesh(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """The parameters for an optimizer; in groups by their mesh where they have several, which PyTorch's fused and
    foreach optimizers do not update together."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(parameters) if len(meshes) == 1 else [{"params": each} for each in meshes.values()]


class MeshTrainer:
    """The suite's own step: see `impl.mesh.Trainer` for its contract."""

    def __init__(
        self,
        parallelize: Callable[[nn.Module, DeviceMesh], nn.Module],
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Named], Optimizer],
        mesh: DeviceMesh,
        *,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        objective: Objective = TOKENS,
    ) -> None:
        model = model_fn()
        self._own_names = OwnNames(model)
        self.model: Any = parallelize(model, mesh)
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"parallelize returned {type(self.model).__name__}, not a module")
        self.parameters = {self._own_name(name): parameter for name, parameter in self.model.named_parameters()}
        self.optimizer = optimizer_fn(list(self.parameters.items()))
        self.max_norm, self.norm_type, self.objective = max_norm, norm_type, objective
        axes = data_axes(mesh.mesh_dim_names or ())
        self._groups = [mesh.get_group(name) for name in axes]
        self._data_ranks = 1
        for group in self._groups:
            self._data_ranks *= dist.get_world_size(group)

    def step(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Train on this rank's micro-batches; return the loss of a token, over all ranks, and the gradients' norm, as
        tensors: the host need not wait for them."""
        self.optimizer.zero_grad(set_to_none=True)
        device = next(iter(self.parameters.values())).device
        counts = torch.stack([self.objective.count(batch).to(device) for batch in batches]).sum()
        tokens = self._over_data(counts)
        total = self._run(batches, tokens)
        gradients = whole_gradients(self.parameters.values())
        norm = self._norm(gradients)
        if torch.isfinite(norm):  # it is the same on every rank
            scale_(gradients, norm, self.max_norm)
            self.optimizer.step()
        return self._over_data(total) / tokens, norm

    def _run(self, batches: Sequence[Any], tokens: Tensor) -> Tensor:
        """Every forward and backward pass, and the gradients' average; the sum of the losses of this rank's tokens."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for index, batch in enumerate(batches):
            with self._synchronizing(index == len(batches) - 1):
                losses = self.objective.losses(self.model, batch)
                # Averaged over the ranks, this is each token's share of all tokens of the step.
                (losses * self._data_ranks / tokens).backward()
            total += losses.detach()
        if hasattr(self.model, "finish_gradient_synchronization"):
            self.model.finish_gradient_synchronization()
        return total

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return total_norm(gradients, self.norm_type)

    def _own_name(self, name: str) -> str:
        return self._own_names[name]

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, by the model's own name. All ranks call."""
        if hasattr(self.model, "gather_full_parameters"):
            return {self._own_name(name): whole for name, whole in self.model.gather_full_parameters().items()}
        return {name: full(parameter.detach()).clone() for name, parameter in self.parameters.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients that the last step's optimizer had, whole; none of a parameter without one. All ranks call."""
        return {name: full(p.grad.detach()).clone() for name, p in self.parameters.items() if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; `load_state_dict` of a new trainer on the same mesh goes on from it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _over_data(self, value: Tensor) -> Tensor:
        """The sum over all ranks with tokens of their own."""
        total = value.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total

    @contextmanager
    def _synchronizing(self, last: bool) -> Iterator[None]:
        """Leave gradients of all but the last micro-batch on their ranks, where the model can."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(last)
            yield
        elif hasattr(self.model, "no_sync") and not last:
            with self.model.no_sync():
                yield
        else:
            yield
