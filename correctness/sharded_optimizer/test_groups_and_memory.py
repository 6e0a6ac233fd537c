"""Which ranks a sharded optimizer is of, and what each of them holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.optimizer_scripts import (
    Group,
    Script,
    Step,
    assert_played,
    assert_value,
    play,
    play_in_groups,
    unsharded,
)
from correctness.support.sharding import parameters
from shardmark.memory import meter
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

SHAPES = ((5, 3), (7,), (), (2, 1, 3), (11,))


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
