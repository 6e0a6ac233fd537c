"""Right trainers on meshes, with steps of their own, that differ from ours: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from correctness.mesh.manual import Manual
from correctness.mesh.operators import SumForward, summed
from correctness.mesh.right import flat_at_the_end
from correctness.support.planting import right
from impl.mesh import MeshTrainer
from impl.mesh.decoder import Batch
from shardmark.api import Unsupported


@right("a step of its own: products cut over tp with sequence parallelism, experts over ep, keys gathered, ZeRO")
class ByHand(Manual):
    pass


@right("products are cut over tp without sequence parallelism")
class WholeSequences(Manual):
    def enter(self, x: Tensor) -> Tensor:
        return _SumBackward.apply(x, self.group("tp"))

    def leave(self, x: Tensor) -> Tensor:
        return SumForward.apply(x, self.group("tp"))

    def enter_whole(self, x: Tensor) -> Tensor:
        return x

    def leave_whole(self, x: Tensor) -> Tensor:
        return x

    def is_on_slices(self, name: str) -> bool:
        return False


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


@right("micro-batches are trained in the other order")
class FromTheLast(Manual):
    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        return super().step(batches[::-1])


@right("each rank of tp routes its part of the sequence")
class RoutesSlices(Manual):
    def cut_mixture(self, mixture: Any, prefix: str) -> None:
        if self.group("tp") is None:
            super().cut_mixture(mixture, prefix)
        elif self.group("ep") is not None:
            raise Unsupported("it takes tp or ep")

    def is_on_slices(self, name: str) -> bool:
        return super().is_on_slices(name) or "feed_forward.experts" in name or self.is_router(name)

    def is_router(self, name: str) -> bool:
        return "router" in name


@right("a trainer that is a subclass of the suite's own")
class Subclassed(MeshTrainer):
    def __init__(self, model_fn: Any, optimizer_fn: Any, mesh: DeviceMesh, *, max_norm: float = 1.0) -> None:
        super().__init__(flat_at_the_end, model_fn, optimizer_fn, mesh, max_norm=max_norm)
