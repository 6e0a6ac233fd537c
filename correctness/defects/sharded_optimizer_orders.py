"""Sharded optimizers that go wrong only with some dtypes, with some closures, or with parameters frozen late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from correctness.support.planting import defect
from correctness.support.simple_zero import SimpleZero
from impl.sharded_optimizer import ShardedOptimizer

MEMORY = "test_a_rank_holds_its_part_of_the_state"


@defect(cause="memory", caught_by=MEMORY)
class BalancesElementsNotBytes(SimpleZero):
    """Of float64 and bfloat16 in turn, one rank has all that is large."""

    def owner(self, index: int) -> int:
        loads = [0] * self.ranks
        for p in self.all_parameters[: index + 1]:
            rank = min(range(self.ranks), key=loads.__getitem__)
            loads[rank] += p.numel()
        return rank


@defect(cause="memory", caught_by=MEMORY)
class PassesTheClosureOn(SimpleZero):
    """To an optimizer of all parameters, from which the others' gradients are hidden: the closure makes them anew."""

    def add_inner_group(self, group: dict[str, Any]) -> None:
        super().add_inner_group({**group, "params": self.param_groups[-1]["params"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.copy_options()
        hidden = [(p, p.grad) for i, p in enumerate(self.all_parameters) if self.owner(i) != self.rank]
        for p, _ in hidden:
            p.grad = None
        loss = self.inner.step(closure)
        for p, grad in hidden:
            p.grad = grad if p.grad is None else p.grad
        self.exchange(self.all_parameters)
        return loss


@defect(cause="gradients", caught_by="test_any_script_ends")
class SendsOnlyTrainable(SimpleZero):
    """What was frozen after backward is updated on one rank alone."""

    def exchange(self, parameters: Any) -> None:
        for i, p in enumerate(parameters):
            if p.requires_grad:
                dist.broadcast(p.data, group=self.process_group, group_src=self.owner(i))


@defect(cause="numerics", caught_by="test_an_optimizer_that_needs_whole_parameters")
class TakesAnyOptimizer(ShardedOptimizer):
    """Parts of parameters go to optimizers that look at whole ones."""

    def __init__(self, params: Any, optimizer_cls: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, type("OnShards", (optimizer_cls,), {}), **options)
