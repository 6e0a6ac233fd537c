"""A sharded optimizer's contract, a property a test: on every rank, parameters are what the optimizer itself makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.optimizer_scripts import (
    OPTIMIZERS,
    Add,
    Change,
    Group,
    Played,
    Script,
    Step,
    assert_played,
    assert_value,
    play,
    play_in_groups,
    play_on_rank,
    playing,
    unsharded,
)
from correctness.support.sharding import parameters, set_gradients
from correctness.support.wire import delayed
from shardmark.memory import meter
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

SHAPES = ((5, 3), (7,), (), (2, 1, 3), (11,), (1,), (4, 4))


def check(implementation: Implementation, world: World, script: Script, device: str) -> None:
    """Played on the ranks, the script leaves what it leaves without sharding."""
    found = world.run(play_on_rank, implementation, script, device)
    assert_played(found, play(unsharded, script, device))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_optimizers_own_on_every_rank(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    cls, defaults = OPTIMIZERS[optimizer]
    check(implementation, world, Script([Group(SHAPES)], [Step()] * 3, cls, defaults), device)


def test_fewer_elements_than_ranks(implementation: Implementation, world: World, device: str) -> None:
    check(implementation, world, Script([Group([(1,)])], [Step()] * 2), device)


def test_large_parameters(implementation: Implementation, world: World, device: str) -> None:
    """Above 100,000 elements and 1 MB, with small ones between them."""
    shapes = [(3,), (701, 401), (5,), (100_003,), (2, 2)]
    check(implementation, world, Script([Group(shapes)], [Step()], dtypes=[torch.float32]), device)


def test_parameters_of_several_dtypes(implementation: Implementation, world: World, device: str) -> None:
    dtypes = [torch.float64, torch.float32]
    check(implementation, world, Script([Group(SHAPES)], [Step()] * 2, dtypes=dtypes), device)


def test_each_group_has_its_own_options(implementation: Implementation, world: World, device: str) -> None:
    groups = [
        Group([(5, 3), (3,)]),
        Group([(7,), (2, 2), ()], {"lr": 0.3, "betas": (0.5, 0.6)}),
        Group([(4,)], {"weight_decay": 0.5, "maximize": True}),
    ]
    check(implementation, world, Script(groups, [Step()] * 3), device)


def test_options_changed_between_steps_hold(implementation: Implementation, world: World, device: str) -> None:
    """As a scheduler changes them, or the user."""
    actions = [Step(), Change(0, {"lr": 0.5}), Step(), Change(1, {"weight_decay": 0.3, "betas": (0.5, 0.9)}), Step()]
    check(implementation, world, Script([Group([(5, 3), (3,)]), Group([(7,), ()])], actions), device)


def test_an_added_group_keeps_its_own_options(implementation: Implementation, world: World, device: str) -> None:
    actions = [Add(Group([(7,), (3, 3)], {"lr": 0.4, "weight_decay": 0.5})), Step(), Step()]
    check(implementation, world, Script([Group([(5, 3), (3,)])], actions), device)


def test_a_group_added_between_steps_leaves_the_others_state(
    implementation: Implementation, world: World, device: str
) -> None:
    actions = [Step(), Step(), Add(Group([(7,), (3, 3), ()], {"lr": 0.4})), Step(), Add(Group([(2,)])), Step()]
    check(implementation, world, Script([Group([(5, 3), (3,), (2, 2)])], actions), device)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_parameter_without_a_gradient_stays_and_so_does_its_state(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    cls, defaults = OPTIMIZERS[optimizer]
    actions = [Step(without=(1,)), Step(without=(0, 2, 3)), Step(), Step(without=tuple(range(5))), Step()]
    check(implementation, world, Script([Group(SHAPES[:5])], actions, cls, defaults), device)


def schedule(implementation: Implementation, device: str) -> tuple[list[float], Tensor]:
    (p,) = parameters(device, (5, 3))
    optimizer = implementation.adapted([p], torch.optim.SGD, lr=0.1)
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


def from_a_generator(implementation: Implementation, device: str) -> list[Tensor]:
    params = parameters(device, *SHAPES)
    optimizer = implementation.adapted((p for p in params), torch.optim.SGD, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer), f"{type(optimizer)} is no torch.optim.Optimizer"
    set_gradients(params, 0)
    optimizer.step()
    return [p.detach().cpu() for p in params]


def test_parameters_may_come_from_an_iterator(implementation: Implementation, world: World, device: str) -> None:
    params = parameters(device, *SHAPES)
    set_gradients(params, 0)
    torch.optim.SGD(params, lr=0.1).step()
    for rank, found in enumerate(world.run(from_a_generator, implementation, device)):
        for i, (x, p) in enumerate(zip(found, params, strict=True)):
            assert_value(f"parameter {i} on rank {rank}", x, p.detach())


def with_a_closure(implementation: Implementation, device: str) -> tuple[Any, int, Tensor]:
    (p,) = parameters(device, (3,))
    optimizer = implementation.adapted([p], torch.optim.SGD, lr=0.25)
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
        assert_value(f"the parameter on rank {rank}", parameter, start / 2)


def clear(implementation: Implementation, device: str, set_to_none: bool) -> list[str]:
    """What is left of gradients."""
    params = parameters(device, *SHAPES)
    optimizer = implementation.adapted(params, torch.optim.SGD, lr=0.1)
    set_gradients(params, 0)
    optimizer.zero_grad(set_to_none)
    return [f"parameter {i}" for i, p in enumerate(params) if p.grad is not None and p.grad.any()]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
def test_zero_grad_clears_every_gradient(
    implementation: Implementation, world: World, set_to_none: bool, device: str
) -> None:
    for rank, left in enumerate(world.run(clear, implementation, device, set_to_none)):
        assert not left, f"after zero_grad there are gradients on rank {rank}, of {', '.join(left)}"


def step_late(implementation: Implementation, script: Script, device: str, late: int) -> Played:
    with delayed(before=0.02, on=late):
        return play_on_rank(implementation, script, device)


def test_parameters_are_updated_when_step_returns(implementation: Implementation, world: World, device: str) -> None:
    """Though each rank in turn is late in each of its collectives."""
    script = Script([Group([(5, 3), (7,), (4,)])], [Step()] * 2)
    expected = play(unsharded, script, device)
    for late in range(world.size):
        assert_played(world.run(step_late, implementation, script, device, late), expected)


def interleave(implementation: Implementation, scripts: list[Script], device: str) -> list[Played]:
    found = [Played() for _ in scripts]
    running = [playing(implementation.adapted, script, device, p) for script, p in zip(scripts, found, strict=True)]
    for _ in scripts[0].actions:
        for each in running:
            next(each)
    return found


def test_two_optimizers_side_by_side(implementation: Implementation, world: World, device: str) -> None:
    """Of parameters of the same shapes, in turn, as people train a generator and a discriminator."""
    scripts = [Script([Group(SHAPES)], [Step()] * 3, defaults={"lr": lr}, seed=i) for i, lr in enumerate((0.1, 0.3))]
    ranks = world.run(interleave, implementation, scripts, device)
    for i, script in enumerate(scripts):
        assert_played([found[i] for found in ranks], play(unsharded, script, device))


def test_a_process_group_that_is_not_the_world(implementation: Implementation, world: World, device: str) -> None:
    """Even and odd ranks train side by side, on parameters and gradients of their own; the state too is the group's."""
    script = Script([Group(SHAPES)], [Step(), Step(without=(0,))])
    found = world.run(play_in_groups, implementation, script, device)
    for first in range(min(world.size, 2)):
        own = Script(script.groups, script.actions, seed=first)
        assert_played(found[first::2], play(unsharded, own, device))


def alone(implementation: Implementation, device: str) -> Tensor | None:
    """The last rank's group of one; the others make no optimizer."""
    last = dist.get_world_size() - 1
    group = dist.new_group([last])
    if dist.get_rank() != last:
        return None
    (p,) = parameters(device, (5,))
    optimizer = implementation.adapted([p], torch.optim.SGD, process_group=group, lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return p.detach().cpu()


def test_only_the_groups_ranks_take_part(implementation: Implementation, world: World, device: str) -> None:
    *others, found = world.run(alone, implementation, device)
    assert others == [None] * (world.size - 1)
    assert_value("the parameter of the last rank's own group", found, parameters("cpu", (5,))[0].detach() - 0.5)


class Heavy(torch.optim.Optimizer):
    """Keeps many tensors of each parameter's shape."""

    COPIES = 8

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    for i in range(self.COPIES):
                        state.setdefault(f"copy_{i}", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(state["copy_0"], alpha=group["lr"])


MANY, WIDE = 12, 64


def state_held(implementation: Implementation, device: str) -> int:
    """Bytes of this rank after a step, beyond parameters and gradients."""
    params = [nn.Parameter(torch.zeros(WIDE, WIDE, device=device)) for _ in range(MANY)]
    for p in params:
        p.grad = torch.ones_like(p)
    with meter(device) as memory:
        memory.mark("before")
        optimizer = implementation.adapted(params, Heavy)
        optimizer.step()
        memory.mark("after")
    del optimizer
    return memory.phases["after"] - memory.phases["before"]


def test_a_rank_holds_its_part_of_the_state(implementation: Implementation, world: World, device: str) -> None:
    """Of whole parameters at most, and room for the parameters twice, to communicate them."""
    if implementation.name == "unsharded" or world.size == 1:
        pytest.skip("there is nothing to shard")
    one = 4 * WIDE * WIDE
    allowed = Heavy.COPIES * -(-MANY // world.size) * one + 2 * MANY * one
    held = world.run(state_held, implementation, device)
    for rank, found in enumerate(held):
        assert found <= allowed, (
            f"rank {rank} of {world.size} holds {found:,} bytes after a step, more than its part of the state and "
            f"buffers of twice the parameters, {allowed:,}; all of the state is {Heavy.COPIES * MANY * one:,}"
        )
