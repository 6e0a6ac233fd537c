"""Right trainers on meshes that reduce gradients, losses or norms in unusual ways: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.mesh.manual import Manual
from correctness.support.planting import right
from impl.clipping import gathered_norm
from impl.mesh.decoder import Batch


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
