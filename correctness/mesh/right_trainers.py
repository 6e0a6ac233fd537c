"""Right trainers on meshes, with steps of their own, that differ from ours: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from correctness.mesh.manual import Manual
from correctness.mesh.operators import SumForward, summed
from correctness.mesh.right import flat_at_the_end
from correctness.support.planting import right
from impl.clipping import gathered_norm
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


@right("losses are scaled up and gradients averaged, in place of sums")
class Averages(Manual):
    def weighted(self, losses: Tensor, batch: Batch, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        return losses * self.data_ranks() / tokens

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        assert parameter.grad is not None
        parameter.grad = parameter.grad / self.data_ranks()


@right("gradients of each micro-batch are reduced at once, and added")
class ReducesEachPass(Manual):
    def backward(self, loss: Tensor, last: bool) -> None:
        before = {name: p.grad for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        loss.backward()
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                self.reduce(name, parameter)
                known = before[name]
                if known is not None and parameter.grad is not None:
                    parameter.grad = known + parameter.grad

    def reduce_gradients(self) -> None:
        pass


@right("the losses of all micro-batches are added, and there is one backward pass")
class OneBackward(Manual):
    pending: Tensor | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.pending = loss if self.pending is None else self.pending + loss
        if last:
            self.pending.backward()
            self.pending = None


@right("micro-batches are trained in the other order")
class FromTheLast(Manual):
    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        return super().step(batches[::-1])


@right("the norm is that of whole gradients, gathered on every rank")
class GathersForTheNorm(Manual):
    def norm(self) -> Tensor:
        return gathered_norm(list(self.full_gradients().values()))


@right("gradients are summed on the first rank of an axis and sent to the others")
class ByTheFirstRank(Manual):
    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        for axis in self.reduced_over(name):
            if (group := self.group(axis)) is not None:
                dist.reduce(own, group=group, group_dst=0)
                dist.broadcast(own, group=group, group_src=0)
        parameter.grad = own


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
