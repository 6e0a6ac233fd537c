"""Every rank trains the whole model on the whole batch: what is right, and saves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from impl.clipping import gathered_norm, scale_
from impl.mesh.objective import TOKENS, Objective
from impl.mesh.trainer import Named
from shardmark.api import AXES, Mesh, Share, register


def whole(parts: Mapping[tuple[int, ...], Any], axes: Sequence[str]) -> Any:
    """The batch of one process, from its parts by coordinates along those axes, the outermost first."""
    if not axes:
        return parts[()]
    dim = 1 if AXES[axes[0]] is Share.SLICES else 0
    inner = [
        whole({place[1:]: part for place, part in parts.items() if place[0] == index}, axes[1:])
        for index in sorted({place[0] for place in parts})
    ]
    return tuple(torch.cat(tensors, dim) for tensors in zip(*inner, strict=True))


class OneProcess:
    """Trains as one process does, and on a mesh gathers what its ranks have. See `impl.mesh.Trainer`. `mesh` is
    None where there is one process."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Named], Optimizer],
        mesh: DeviceMesh | None,
        *,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        objective: Objective = TOKENS,
    ) -> None:
        self.model = model_fn()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = optimizer_fn(list(self.parameters.items()))
        self.mesh, self.objective = mesh, objective
        self.max_norm, self.norm_type = max_norm, norm_type

    def step(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Train on the whole of each micro-batch; return the loss of a token and the gradients' norm."""
        batches = [self._whole(batch) for batch in batches]
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(int(self.objective.count(batch)) for batch in batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            losses = self.objective.losses(self.model, batch)
            (losses / tokens).backward()
            total += losses.detach().cpu()
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = gathered_norm(gradients, self.norm_type)
        if torch.isfinite(norm):
            scale_(gradients, norm, self.max_norm)
            self.optimizer.step()
        return total / tokens, norm

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.detach().clone() for name, p in self.parameters.items() if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _whole(self, batch: Any) -> Any:
        if self.mesh is None:
            return batch
        sizes = zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)
        mesh = Mesh(tuple(sizes))
        axes = [*mesh.along(Share.ROWS), *mesh.along(Share.SLICES)]
        if not axes:
            return batch
        found: dict[tuple[int, ...], Any] = {(): batch}
        for axis in reversed(axes):  # by groups of the mesh, which may have some of the world's ranks
            along: list[Any] = [None] * self.mesh[axis].size()
            dist.all_gather_object(along, found, group=self.mesh.get_group(axis))
            found = {(index, *place): each for index, parts in enumerate(along) for place, each in parts.items()}
        return whole(found, axes)


register("mesh", "naive", OneProcess, called="one process on every rank")
