"""Planted defects of sharded optimizers that show by what a user does around a step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero
from correctness.support.planting import defect

HISTORY = "test_any_history_is_as_without_sharding"


@defect(cause="gradients", caught_by=HISTORY)
class FreesWhatOthersUpdate(SimpleZero):
    """A step frees the gradients of parameters that other ranks own: a user who adds to them adds to nothing."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        for i, p in enumerate(self.all_parameters):
            if self.owner(i) != self.rank:
                p.grad = None
        return loss


@defect(cause="numerics", caught_by="test_every_rank_steps_where_a_gradient_is_not_finite")
class SkipsInFewBits(SimpleZero):
    """Infinities and NaN in 16-bit gradients count as zero, as if a loss scaler were there."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        self.kept = [(p, p.grad) for p in self.all_parameters if p.grad is not None and p.dtype == torch.bfloat16]
        for p, gradient in self.kept:
            p.grad = gradient.nan_to_num(0.0, 0.0, 0.0)
        return loss

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        super().exchange(parameters)
        for p, gradient in self.kept:
            p.grad = gradient


@defect(cause="state", caught_by=HISTORY)
class StaysInTheClosure(SimpleZero):
    """The flag that the closure runs, in which a step is none, is not reset where it raises."""

    inside = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.inside:
            return self.call(closure)
        self.inside = closure is not None
        loss = super().step(closure)
        self.inside = False
        return loss


@defect(cause="state", caught_by="test_a_step_is_the_optimizers_own_on_every_rank")
class AllocatesTheState(SimpleZero):
    """State that exists before the first step moves into memory of the shard, which is zeros."""

    def add_inner_group(self, group: Group) -> None:
        super().add_inner_group(group)
        for p in group["params"]:
            for value in self.inner.state[p].values() if p in self.inner.state else ():
                if isinstance(value, Tensor):
                    value.zero_()
