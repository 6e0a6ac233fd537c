"""Planted defects: wrong sharded optimizers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero, options
from correctness.support.planting import defect
from impl.distributed import broadcast_in_place

STEP = "test_a_step_is_the_optimizers_own"


@defect(cause="world size", caught_by=STEP)
class LeavesTheRemainder(SimpleZero):
    """Gives each rank equally many parameters; the remainder has no owner."""

    def owner(self, index: int) -> int:
        return min(index // 2, self.ranks)

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, parameter in enumerate(parameters):
            if self.owner(i) < self.ranks:
                broadcast_in_place(parameter.data, self.process_group, self.owner(i))


@defect(cause="world size", caught_by=STEP)
class HalvesGradients(SimpleZero):
    """Averages already averaged gradients again, as if there were two ranks."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        for p in self.all_parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=self.process_group)
                p.grad /= 2
        return loss


@defect(cause="options", caught_by="test_an_added_group_keeps_its_own_options")
class AddsWithDefaults(SimpleZero):
    def add_inner_group(self, group: Group) -> None:
        super().add_inner_group(group if self.inner is None else {"params": group["params"]})

    def taken(self, group: Group) -> Group:
        return {"lr": group["lr"]}


@defect(cause="options", caught_by="test_options_changed_between_steps_hold")
class RateOfTheStart(SimpleZero):
    """facebookresearch/fairscale#58: a rate that a scheduler changes does not reach the ranks' own optimizers."""

    def taken(self, group: Group) -> Group:
        return {}


@defect(cause="options", caught_by="test_each_group_has_its_own_options")
class FirstGroupsOptions(SimpleZero):
    def copy_options(self) -> None:
        for inner in self.inner.param_groups:
            inner.update(options(self.param_groups[0]))


@defect(cause="state", caught_by="test_a_loaded_state_brings_its_options")
class KeepsItsOwnOptions(SimpleZero):
    """pytorch/xla#9164: loads the state, and keeps the options that it had."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = [options(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for groups in (self.param_groups, self.inner.param_groups):
            for group, before in zip(groups, own, strict=True):
                group.update(before)


@defect(cause="state", caught_by="test_a_loaded_state_trains_on_as_if_never_saved")
class StepsCountAnew(SimpleZero):
    def loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | ({"step": torch.zeros(())} if "step" in state else {})


@defect(cause="state", caught_by="test_a_loaded_state_trains_on_as_if_never_saved")
class LoadsNoSecondMoment(SimpleZero):
    def loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value * 0 if name == "exp_avg_sq" else value for name, value in state.items()}


@defect(cause="state", caught_by="test_state_that_is_no_tensor_is_saved")
class SavesTensorsAlone(SimpleZero):
    def own_state(self) -> dict[int, Any]:
        return {
            i: {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for i, state in super().own_state().items()
        }


@defect(cause="world size", caught_by="test_a_state_loads_on_another_number_of_ranks")
class LoadsByRank(SimpleZero):
    """Splits a loaded state by the saved number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ranks": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, ranks = state_dict["state"], state_dict.get("ranks", self.ranks)
        own = {i: state for i, state in saved.items() if i % ranks == self.rank}
        super().load_state_dict(state_dict | {"state": own})


@defect(cause="state", caught_by="test_the_state_is_the_optimizers_own_on_every_rank")
class StateOnRankZero(SimpleZero):
    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return found if self.rank == 0 else found | {"state": {}}


@defect(cause="state", caught_by="test_the_state_is_the_optimizers_own")
class SavesItsShard(SimpleZero):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"state": self.own_state()}


@defect(cause="state", caught_by="test_a_group_added_between_steps")
class DealsAgain(SimpleZero):
    """A new group replaces this rank's optimizer and loses its state."""

    def add_inner_group(self, group: Group) -> None:
        old = [] if self.inner is None else self.inner.param_groups
        self.inner = self.optimizer_cls([*({**options(g), "params": g["params"]} for g in old), group], **self.defaults)


@defect(cause="memory", caught_by="test_a_rank_holds_its_part_of_the_state")
class HoldsEverything(SimpleZero):
    """Every rank updates every parameter."""

    def owner(self, index: int) -> int:
        return self.rank

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        """Send nothing: every rank has updated everything."""


@defect(cause="handles", caught_by="test_parameters_are_updated_when_step_returns")
class WaitsForNothing(SimpleZero):
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        self.handles = [
            dist.broadcast(p.data, group=self.process_group, group_src=self.owner(i), async_op=True)
            for i, p in enumerate(parameters)
        ]


@defect(cause="subgroup", caught_by="test_a_process_group_that_is_not_the_world")
class RanksOfTheWorld(SimpleZero):
    """facebookresearch/fairscale#121: receives from the owner's rank in the group as if it were one of the world."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, src=self.owner(i), group=self.process_group)


@defect(cause="subgroup", caught_by="test_a_process_group_that_is_not_the_world")
class AllTheWorld(SimpleZero):
    def __init__(self, *args: Any, process_group: Any = None, **defaults: Any) -> None:
        super().__init__(*args, process_group=None, **defaults)


@defect(cause="gradients", caught_by="test_a_parameter_without_a_gradient_stays")
class ZerosWhereNone(SimpleZero):
    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        for p in self.all_parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return loss


@defect(cause="shapes", caught_by="test_large_parameters")
class BucketsTooSmall(SimpleZero):
    """Puts a parameter larger than a bucket into no bucket."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            if p.nbytes <= 2**20:
                broadcast_in_place(p.data, self.process_group, self.owner(i))


@defect(cause="shapes", caught_by=STEP)
class NoScalars(SimpleZero):
    """Puts a parameter without dimensions into no shard."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            if p.dim():
                broadcast_in_place(p.data, self.process_group, self.owner(i))


@defect(cause="two calls", caught_by="test_two_optimizers_side_by_side")
class OneForAll(SimpleZero):
    """All optimizers share one buffer by index, so a second optimizer sends the first one's parameters."""

    waiting: ClassVar[dict[int, Tensor]] = {}

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            self.waiting.setdefault(i, p.data)  # reused by the next optimizer
            dist.broadcast(self.waiting[i], group=self.process_group, group_src=self.owner(i))


@defect(cause="communication", caught_by=STEP)
class OwnFirst(SimpleZero):
    """Each rank sends what it owns before it receives, so ranks meet in different collectives."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        order = sorted(enumerate(parameters), key=lambda each: self.owner(each[0]) != self.rank)
        for i, p in order:
            broadcast_in_place(p.data, self.process_group, self.owner(i))


@defect(cause="numerics", caught_by=STEP)
class SendsHalves(SimpleZero):
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            sent = p.data.bfloat16()
            dist.broadcast(sent, group=self.process_group, group_src=self.owner(i))
            if self.owner(i) != self.rank:
                p.data.copy_(sent)


@defect(cause="state", caught_by="test_a_closure_is_called_once")
class CallsTwice(SimpleZero):
    def call(self, closure: Callable[[], Any] | None) -> Any:
        super().call(closure)
        return super().call(closure)


@defect(cause="state", caught_by="test_a_closure_is_called_once")
class ForgetsTheLoss(SimpleZero):
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)


@defect(cause="gradients", caught_by="test_zero_grad")
class ZeroesItsOwn(SimpleZero):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@defect(cause="errors", caught_by="test_a_state_that_does_not_fit")
class LoadsAnything(SimpleZero):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(self.all_parameters) == sum(len(group["params"]) for group in state_dict["param_groups"]):
            super().load_state_dict(state_dict)


@defect(cause="memory", caught_by="test_a_rank_holds_its_part_of_the_state")
class DealsEachGroupFromRankZero(SimpleZero):
    """With one parameter per group, rank 0 owns the whole state."""

    def owner(self, index: int) -> int:
        first = [i for group in self.param_groups for i in range(len(group["params"]))]
        return first[index] % self.ranks


@defect(cause="subgroup", caught_by="test_any_history")
class LoadsByRankOfTheWorld(SimpleZero):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        own = {i: state for i, state in saved.items() if self.owner(i) == dist.get_rank()}
        super().load_state_dict(state_dict | {"state": own})


@defect(cause="state", caught_by="test_a_state_is_loaded_as_the_optimizer_loads_it")
class LoadsInTheParametersDtype(SimpleZero):
    """Loads with torch's `load_state_dict`, which casts, in place of `optimizer_cls`'s."""

    def add_inner_group(self, group: Group) -> None:
        super().add_inner_group(group)
        self.inner.load_state_dict = partial(torch.optim.Optimizer.load_state_dict, self.inner)


@defect(cause="gradients", caught_by="test_any_history")
class ForgetsTheFrozen(SimpleZero):
    """Never sends a parameter that was frozen when its group was added."""

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self.sent = [*getattr(self, "sent", []), *(p.requires_grad for p in self.param_groups[-1]["params"])]

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            if self.sent[i]:
                broadcast_in_place(p.data, self.process_group, self.owner(i))
