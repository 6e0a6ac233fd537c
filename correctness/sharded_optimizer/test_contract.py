"""Contract of a sharded optimizer, one property per test: every rank's parameters equal the unsharded optimizer's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.engine.histories import play
from correctness.sharded_optimizer.events import Add, Change, Step
from correctness.sharded_optimizer.player import Beside, assert_value, assert_values, check
from correctness.sharded_optimizer.sharding import parameters, raised, set_gradients
from correctness.sharded_optimizer.training import Group, History, unsharded
from correctness.sharded_optimizer.unusual_optimizers import OPTIMIZERS
from correctness.support.communication import delayed
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

SHAPES = ((5, 3), (7,), (), (2, 1, 3), (11,), (1,), (4, 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_optimizers_own_on_every_rank(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    cls, defaults = OPTIMIZERS[optimizer]
    check(implementation, world, History([Group(SHAPES)], [Step()] * 3, cls, defaults), device)


def test_fewer_elements_than_ranks(implementation: Implementation, world: World, device: str) -> None:
    check(implementation, world, History([Group([(1,)])], [Step()] * 2), device)


def refusal(implementation: Implementation, history: History, device: str) -> str:
    """Return the ValueError that the sharded optimizer raises, if any."""
    try:
        play(Beside(implementation, history, device), history)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("optimizer", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_parameters_is_right_or_refused(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    history = History([Group([(8, 6), (12, 4), (5, 5)])], [Step()] * 2, getattr(torch.optim, optimizer), {"lr": 0.1})
    found = world.run(refusal, implementation, history, device)
    if not all(found):
        refused = [rank for rank, each in enumerate(found) if each]
        assert not refused, f"{optimizer} is refused on ranks {refused} alone: {found[refused[0]]}"
        try:
            check(implementation, world, history, device, partial(Beside, rtol=1e-5))
        except AssertionError as error:
            raise AssertionError(f"{optimizer} is neither refused with a ValueError nor right: {error}") from None


def test_large_parameters(implementation: Implementation, world: World, device: str) -> None:
    """Parameters over 100,000 elements and over 1 MB, with small ones between them."""
    shapes = [(3,), (701, 401), (5,), (100_003,), (2, 2)]
    check(implementation, world, History([Group(shapes)], [Step()], dtypes=[torch.float32]), device)


@pytest.mark.examples(1, 4, 12)
def test_no_parameter_is_left_of_any_number(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    for count in BESIDE_LAUNCHES[:examples]:
        check(implementation, world, History([Group([(1,)] * count)], [Step()]), device)


def test_each_group_has_its_own_options(implementation: Implementation, world: World, device: str) -> None:
    groups = [
        Group([(5, 3), (3,)]),
        Group([(7,), (2, 2), ()], {"lr": 0.3, "betas": (0.5, 0.6)}),
        Group([(4,)], {"weight_decay": 0.5, "maximize": True}),
    ]
    check(implementation, world, History(groups, [Step()] * 3), device)


def test_options_changed_between_steps_hold(implementation: Implementation, world: World, device: str) -> None:
    """A scheduler or the user may set options between steps."""
    events = [Step(), Change(0, {"lr": 0.5}), Step(), Change(1, {"weight_decay": 0.3, "betas": (0.5, 0.9)}), Step()]
    check(implementation, world, History([Group([(5, 3), (3,)]), Group([(7,), ()])], events), device)


def test_an_added_group_keeps_its_own_options(implementation: Implementation, world: World, device: str) -> None:
    events = [Add(Group([(7,), (3, 3)], {"lr": 0.4, "weight_decay": 0.5})), Step(), Step()]
    check(implementation, world, History([Group([(5, 3), (3,)])], events), device)


def test_a_group_added_between_steps_leaves_the_others_state(
    implementation: Implementation, world: World, device: str
) -> None:
    events = [Step(), Step(), Add(Group([(7,), (3, 3), ()], {"lr": 0.4})), Step(), Add(Group([(2,)])), Step()]
    check(implementation, world, History([Group([(5, 3), (3,), (2, 2)])], events), device)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_parameter_without_a_gradient_stays_and_so_does_its_state(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    cls, defaults = OPTIMIZERS[optimizer]
    events = [Step(without=(1,)), Step(without=(0, 2, 3)), Step(), Step(without=tuple(range(5))), Step()]
    check(implementation, world, History([Group(SHAPES[:5])], events, cls, defaults), device)


def schedule(implementation: Implementation, device: str) -> tuple[list[float], Tensor]:
    (p,) = parameters(device, (5, 3))
    optimizer = implementation.watched([p], torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    return rates, p.detach().cpu()


def test_a_scheduler_changes_the_rate(implementation: Implementation, world: World, device: str) -> None:
    start = parameters("cpu", (5, 3))[0].detach()
    for rank, (rates, parameter) in enumerate(world.run(schedule, implementation, device)):
        assert rates == [0.1, 0.1, 0.05, 0.05], f"param_groups of rank {rank} had the rates {rates}"
        assert_value(f"the parameter on rank {rank}", parameter, start - 0.3)


GIVEN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "a_generator": lambda params: (p for p in params),
    "names": lambda params: [(f"layer {i}", p) for i, p in enumerate(params)],
    "groups_of_generators": lambda params: [{"params": (p for p in params[:3])}, {"params": iter(params[3:])}],
    "groups_of_names": lambda params: [{"params": [(f"layer {i}", p) for i, p in enumerate(params)]}],
    "a_group_of_one": lambda params: [{"params": params[0]}, {"params": params[1:]}],
}
"""Forms of `params` that torch's optimizers accept."""


def given_as(implementation: Implementation, how: str, device: str) -> list[Tensor]:
    params = parameters(device, *SHAPES)
    optimizer = implementation.watched(GIVEN[how](params), torch.optim.SGD, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer), f"{type(optimizer)} is no torch.optim.Optimizer"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in params], "param_groups have other parameters than the user gave"
    set_gradients(params, 0)
    optimizer.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("how", GIVEN)
def test_param_groups_have_the_users_parameters(
    implementation: Implementation, world: World, how: str, device: str
) -> None:
    params = parameters(device, *SHAPES)
    set_gradients(params, 0)
    torch.optim.SGD(params, lr=0.1).step()
    assert_values(world.run(given_as, implementation, how, device), params)


def changed_between_steps(make: Any, device: str, dtype: torch.dtype | None) -> list[Tensor]:
    """Train parameters that are clamped and scaled in place after each step."""
    params = parameters(device, *SHAPES, dtype=dtype)
    optimizer = make(params, torch.optim.AdamW, lr=0.1)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
        with torch.no_grad():
            for p in params:
                p.clamp_(-0.5, 0.5).mul_(0.9)
    return [p.detach().cpu() for p in params]


def changed_on_rank(implementation: Implementation, device: str, dtype: torch.dtype | None) -> list[Tensor]:
    return changed_between_steps(implementation.watched, device, dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["exact", "bfloat16"])
def test_parameters_may_be_changed_between_steps(
    implementation: Implementation, world: World, dtype: torch.dtype | None, device: str
) -> None:
    expected = changed_between_steps(unsharded, device, dtype)
    ranks = world.run(changed_on_rank, implementation, device, dtype)
    assert_values(ranks, expected, ", clamped and scaled after each step")


def with_a_closure(implementation: Implementation, device: str) -> tuple[Any, int, Tensor]:
    (p,) = parameters(device, (3,))
    optimizer = implementation.watched([p], torch.optim.SGD, lr=0.25)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.detach() + calls

    return optimizer.step(closure), calls, p.detach().cpu()


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned(
    implementation: Implementation, world: World, device: str
) -> None:
    start = parameters("cpu", (3,))[0].detach()
    for rank, (loss, calls, parameter) in enumerate(world.run(with_a_closure, implementation, device)):
        assert calls == 1, f"step(closure) called the closure {calls} times on rank {rank}"
        assert loss is not None, f"step(closure) returned None on rank {rank}, and not the closure's loss"
        assert_value(f"the closure's loss on rank {rank}", loss, start.square().sum() + 1)
        assert_value(f"after step(closure), the parameter on rank {rank}", parameter, start / 2, before=start)


def clear(implementation: Implementation, device: str, set_to_none: bool) -> list[str]:
    """Name the gradients that `zero_grad` left."""
    params = parameters(device, *SHAPES)
    optimizer = implementation.watched(params, torch.optim.SGD, lr=0.1)
    set_gradients(params, 0)
    optimizer.zero_grad(set_to_none)
    return [f"parameter {i}" for i, p in enumerate(params) if p.grad is not None and p.grad.any()]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
def test_zero_grad_clears_every_gradient(
    implementation: Implementation, world: World, set_to_none: bool, device: str
) -> None:
    for rank, left in enumerate(world.run(clear, implementation, device, set_to_none)):
        assert not left, f"after zero_grad there are gradients on rank {rank}, of {', '.join(left)}"


class Late(Beside):
    """A training where one rank is late in each of its collectives."""

    def __init__(self, implementation: Implementation, history: History, device: str, late: int) -> None:
        super().__init__(implementation, history, device)
        self.late = late

    def play(self, event: Step) -> None:
        with delayed(before=0.02, on=self.late):
            super().play(event)


def test_parameters_are_updated_when_step_returns(implementation: Implementation, world: World, device: str) -> None:
    history = History([Group([(5, 3), (7,), (4,)])], [Step()] * 2)
    for late in range(world.size):
        check(implementation, world, history, device, partial(Late, late=late))


class Two:
    """Two trainings with equal shapes that step in turn, like a generator and a discriminator."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        other = replace(history, defaults={"lr": 0.3}, seed=1)
        self.both = [Beside(implementation, each, device) for each in (history, other)]

    def play(self, event: Step) -> None:
        for each in self.both:
            each.play(event)

    def problem(self) -> str:
        return self.both[0].problem() or self.both[1].problem()


def test_two_optimizers_side_by_side(implementation: Implementation, world: World, device: str) -> None:
    check(implementation, world, History([Group(SHAPES)], [Step()] * 3), device, Two)


def add_again(implementation: Implementation, device: str) -> str:
    p, q = parameters(device, (3,), (4,))
    optimizer = implementation.watched([p, q], torch.optim.SGD, lr=0.1)
    return raised(lambda: optimizer.add_param_group({"params": [p]}))


@pytest.mark.should("a parameter that is there already is a ValueError")
def test_a_parameter_that_is_there_already_is_not_added(
    implementation: Implementation, world: World, device: str
) -> None:
    for rank, line in enumerate(world.run(add_again, implementation, device)):
        assert line.startswith("ValueError"), (
            f"add_param_group with a parameter of another group raised {line} on rank {rank}, expected ValueError"
        )
