"""Process groups of a sharded optimizer, options that change, and the memory that each rank holds."""

import gc
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.sharded_optimizer.events import Restore, Save, Step
from correctness.sharded_optimizer.player import Beside, assert_value, check
from correctness.sharded_optimizer.sharding import parameters, set_gradients
from correctness.sharded_optimizer.training import Group, History
from correctness.sharded_optimizer.unusual_optimizers import Heavy
from correctness.support.contracts import assert_little_outside_of_tensors
from correctness.support.default_dtype import OTHERS, default_dtype
from correctness.support.on_ranks import on_every_rank
from shardmark.api import Implementation, Unsupported
from shardmark.meter.memory import meter
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

SHAPES = ((5, 3), (7,), (), (2, 1, 3), (11,))


def test_a_process_group_that_is_not_the_world(implementation: Implementation, world: World, device: str) -> None:
    """Even and odd ranks train side by side with separate parameters and gradients; the state too covers one group."""
    events = [Step(), Step(without=(0,)), Save()]
    check(implementation, world, History([Group(SHAPES)], events, in_groups=True), device)


def alone(implementation: Implementation, device: str) -> Tensor | None:
    """Train in a group that has the last rank alone; the other ranks make no optimizer."""
    last = dist.get_world_size() - 1
    group = dist.new_group([last])
    if dist.get_rank() != last:
        return None
    (p,) = parameters(device, (5,))
    optimizer = implementation.watched([p], torch.optim.SGD, process_group=group, lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return p.detach().cpu()


def test_only_the_groups_ranks_take_part(implementation: Implementation, world: World, device: str) -> None:
    *others, found = world.run(alone, implementation, device)
    assert others == [None] * (world.size - 1)
    assert_value("the parameter of the last rank's own group", found, parameters("cpu", (5,))[0].detach() - 0.5)


class InAnotherDefaultDtype(Beside):
    """Everything happens where new tensors have this dtype."""

    def __init__(self, default: torch.dtype, *args: Any, **options: Any) -> None:
        self.default = default
        with default_dtype(default):
            super().__init__(*args, **options, rtol=1e-5)  # a hundred roundings in float32

    def play(self, event: Any) -> None:
        with default_dtype(self.default):
            super().play(event)


@pytest.mark.parametrize("default", OTHERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_another_default_dtype_rounds_no_parameter_and_no_state(
    implementation: Implementation, world: World, default: torch.dtype, device: str
) -> None:
    """Parameters are float32; a buffer that is made without a dtype has the job's default."""
    events = [Step(), Save(), Step(without=(0,)), Restore(), Step()]
    history = History([Group(SHAPES)], events, dtypes=[torch.float32])
    check(implementation, world, history, device, partial(InAnotherDefaultDtype, default))


COUNT, WIDE = 12, 32
"""Number of parameters; rows of most of them."""
THAWED = "a step after all are thawed"


@dataclass(frozen=True)
class Division:
    """Parameters in param groups; those with index `added` and above are added one step later."""

    columns: tuple[int, ...]
    """Columns of each parameter."""
    groups: tuple[int, ...]
    """Number of parameters in each group."""
    added: int
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """dtypes of the parameters, cycled."""
    copies: int = 10
    """Tensors of each parameter's shape in its state."""
    rows: int = WIDE
    """Rows of each parameter."""
    frozen: int = 0
    """Number of parameters that are frozen, the first ones: they have no state until the last phase thaws them."""

    def bytes_of_each(self, phase: str) -> list[int]:
        """Sizes of the parameters that are trained in that phase."""
        return [p.nbytes for p in self.parameters("cpu")[0 if phase == THAWED else self.frozen :]]

    @property
    def buffers(self) -> int:
        """Bytes that communication may take: twice the parameters."""
        return 2 * sum(p.nbytes for p in self.parameters("cpu"))

    def parameters(self, device: str) -> list[nn.Parameter]:
        return [
            nn.Parameter(torch.zeros(self.rows, n, dtype=dtype, device=device), requires_grad=i >= self.frozen)
            for i, (n, dtype) in enumerate(zip(self.columns, cycle(self.dtypes), strict=False))
        ]


def mostly_frozen() -> Division:
    """The first two thirds, as below a head that is trained: dividing all by elements gives one rank the state."""
    return Division((WIDE,) * COUNT, (COUNT,), 1, copies=40, frozen=2 * COUNT // 3)


def wide_and_half(ranks: int) -> Division:
    """Equal element counts: dealing parameters out in turn gives rank 0 all float64 ones."""
    return Division((WIDE,) * COUNT, (COUNT,), 1, (torch.float64, *(torch.bfloat16,) * (ranks - 1)), copies=18)


def alone_in_groups(count: int) -> Division:
    """One element per parameter, one parameter per group: dividing each group anew gives rank 0 everything."""
    return Division((1,) * count, (1,) * count, count // 2, copies=40, rows=1)


def random_division(draw: Random, largest: int) -> Division:
    """Draw groups of at most `largest` parameters."""
    mixed = tuple(draw.choice([1, 8, WIDE, 2 * WIDE]) for _ in range(COUNT))
    columns = (WIDE,) * COUNT if largest == 1 else draw.choice([(WIDE,) * COUNT, mixed])
    groups: list[int] = []
    while (left := COUNT - sum(groups)) > 0:
        groups.append(draw.randint(1, min(largest, left)))
    return Division(columns, tuple(groups), added=draw.choice([len(groups), draw.randint(1, len(groups))]))


def state_held(implementation: Implementation, divisions: list[Division], device: str) -> list[dict[str, int]]:
    """For each supported division: bytes on this rank beyond parameters and gradients, after each phase."""
    held = []
    for division in divisions:
        try:
            held.append(_held(implementation, division, device))
        except Unsupported:
            held.append({})
    return held


def _held(implementation: Implementation, division: Division, device: str) -> dict[str, int]:
    params = division.parameters(device)

    def give_gradients() -> None:
        for p in params[division.frozen :]:
            p.grad = torch.ones_like(p)

    give_gradients()
    later = [torch.ones_like(p) for p in params[: division.frozen]]
    rest = iter(params)
    groups = [{"params": list(islice(rest, n))} for n in division.groups]
    with meter(device) as memory:
        memory.mark("before")
        optimizer = implementation.watched(groups[: division.added], Heavy, copies=division.copies)
        optimizer.step()
        for group in groups[division.added :]:
            optimizer.add_param_group(group)
        optimizer.step()
        memory.mark("step")
        optimizer.step(give_gradients)
        memory.mark("a step whose closure gives every parameter its gradient")
        saved = optimizer.state_dict()
        del saved
        gc.collect()
        memory.mark("state_dict, whose result is dropped")
        saved = deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        del saved
        gc.collect()
        memory.mark("load_state_dict, whose argument is dropped")
        optimizer.step()
        memory.mark("a step after loading")
        for p, gradient in zip(params, later, strict=False):
            p.requires_grad_().grad = gradient
        optimizer.step()
        memory.mark(THAWED)
    held = {phase: n - memory.phases["before"] for phase, n in memory.phases.items() if phase != "before"}
    del optimizer
    return held


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.sweep)])
def test_a_rank_holds_its_part_of_the_state(
    implementation: Implementation, world: World, times: int, device: str
) -> None:
    """A rank holds at most its share of the state, rounded up to whole parameters, and communication buffers of twice
    the parameters: for any division into groups, after steps and after loading."""
    if implementation.name == "unsharded" or world.size == 1:
        pytest.skip("there is nothing to shard")
    draw = Random(torch.initial_seed())
    divisions = [random_division(draw, largest) for _ in range(times) for largest in (1, COUNT, 2)[: times + 1]]
    divisions += [wide_and_half(world.size), alone_in_groups(8), mostly_frozen()]
    for rank, found in enumerate(world.run(state_held, implementation, divisions, device)):
        for division, phases in zip(divisions, found, strict=True):
            names = " and ".join(map(str, dict.fromkeys(division.dtypes)))
            for phase, held in phases.items():
                sizes = division.bytes_of_each(phase)
                allowed = division.copies * (sum(sizes) // world.size + max(sizes)) + division.buffers
                assert held <= allowed, (
                    f"rank {rank} of {world.size} holds {held:,} bytes after {phase}, more than its part of the state "
                    f"and buffers of twice the parameters, {allowed:,}; all of the state is "
                    f"{division.copies * sum(sizes):,}, of {len(sizes)} parameters of {names} in groups of "
                    f"{list(division.groups)}, the first {division.added} of them there from the start"
                )


def little_is_held_elsewhere(implementation: Implementation, device: str) -> None:
    params = [nn.Parameter(torch.ones(64, 256, device=device)) for _ in range(8)]
    optimizer = implementation.watched(params, torch.optim.AdamW)

    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_little_outside_of_tensors(optimizer)


def test_a_rank_holds_nothing_large_outside_of_tensors(
    implementation: Implementation, world: World, device: str
) -> None:
    """The whole state has 1 MiB."""
    world.run(little_is_held_elsewhere, implementation, device)


@on_every_rank
def test_a_rate_in_a_tensor_is_read_in_each_step(implementation: Implementation, device: str) -> list[str]:
    """Compiled and captured steps have their learning rate in a tensor, which a scheduler fills, also after loading."""
    shapes = (5, 3), (7,)
    found, expected = parameters(device, *shapes), parameters(device, *shapes)
    rates = [torch.tensor(0.1, dtype=torch.float64) for _ in range(2)]
    sharded = implementation.watched(found, torch.optim.Adam, lr=rates[0], foreach=False)
    whole = torch.optim.Adam(expected, lr=rates[1], foreach=False)
    for step in range(5):
        for params, optimizer, rate in ((found, sharded, rates[0]), (expected, whole, rates[1])):
            set_gradients(params, step)
            optimizer.step()
            if step == 0:
                rate.mul_(0.5)  # the caller's own tensor, which is the option
                continue
            if step == 2:
                optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            for group in optimizer.param_groups:
                group["lr"].mul_(0.5)
        off = max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True))
        if not off <= 1e-9:
            return [f"with a tensor lr that is halved in place, parameters are {off:.2g} off after step {step + 1}"]
    return []
