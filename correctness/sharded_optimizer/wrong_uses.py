"""Planted defects of sharded optimizers that show by what a user does around a step."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero, options
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


@defect(cause="options", caught_by="test_options_that_a_closure_sets_hold_in_its_step")
class CopiesOptionsBeforeTheClosure(SimpleZero):
    """Options are copied before the closure is called, which may set them."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        self.before = [options(group) for group in self.param_groups]
        return super().call(closure)

    def taken(self, group: Group) -> Group:
        before = getattr(self, "before", [])
        return next(
            (old for old, each in zip(before, self.param_groups, strict=False) if each is group), options(group)
        )


@defect(cause="gradients", caught_by=HISTORY)
class ClearsWhatIsTrainable(SimpleZero):
    """`zero_grad` leaves the gradient of a parameter that was frozen since."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for p in self.all_parameters if p.requires_grad and p.grad is not None):
            p.grad = None if set_to_none else torch.zeros_like(p)


@defect(cause="state", caught_by=HISTORY)
class KnowsGradientsByTheirTensor(SimpleZero):
    """A gradient is copied into its own where it is another tensor than in the step before."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss, self.seen = super().call(closure), self.__dict__.get("seen", {})
        for p in (p for p in self.all_parameters if p.grad is not None):
            if self.seen.get(p, (None, None))[0] is not p.grad:
                self.seen[p] = p.grad, p.grad.clone()
        self.theirs = {p: p.grad for p in self.all_parameters}
        for p in (p for p in self.all_parameters if p.grad is not None):
            p.grad = self.seen[p][1]
        return loss

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        super().exchange(parameters)
        for p, gradient in self.theirs.items():
            p.grad = gradient


@defect(cause="errors", caught_by="test_what_is_refused_leaves_no_trace")
class HasAGroupForWhatIsRefused(SimpleZero):
    """The optimizer inside has a group for one that is refused too: from then on its groups are another's."""

    def add_param_group(self, param_group: Group) -> None:
        try:
            super().add_param_group(param_group)
        except ValueError:
            self.add_inner_group({**options(param_group), "params": []})
            raise


@defect(cause="errors", caught_by="test_what_is_refused_leaves_no_trace")
class TakesOptionsOfWhatDoesNotFit(SimpleZero):
    """Options of a state are loaded before it is checked."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group.update(options(loaded))
        super().load_state_dict(state_dict)


@defect(cause="options", caught_by="test_a_rate_in_a_tensor_is_read_in_each_step")
class CopiesDefaults(SimpleZero):
    """Defaults are copied: a rate in a tensor is no longer the caller's, who fills it."""

    def __init__(self, params: Any, optimizer_cls: Any, *, process_group: Any = None, **defaults: Any) -> None:
        super().__init__(params, optimizer_cls, process_group=process_group, **deepcopy(defaults))


@defect(cause="numerics", caught_by=HISTORY)
class SendsHalvesAsBfloat16(SimpleZero):
    """float16 is sent as bfloat16, which has three bits less."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            if p.dtype == torch.float16:
                p.data.copy_(p.data.bfloat16())
        super().exchange(parameters)


@defect(cause="random numbers", caught_by=HISTORY)
class SeedsEachRankAlike(SimpleZero):
    """Ranks are seeded alike when it is made, so that an optimizer that draws draws the same on all of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        torch.manual_seed(1234)
        super().__init__(*args, **options)
