"""Whatever is done with a sharded optimizer, in any order: random parameters, groups, changes, and states loaded."""

from __future__ import annotations

from random import Random

import pytest
import torch

from correctness.support.optimizer_scripts import (
    OPTIMIZERS,
    Add,
    Change,
    Group,
    Options,
    Reload,
    Save,
    Script,
    Step,
    assert_played,
    play,
    play_on_rank,
    unsharded,
)
from shardmark.registry import Implementation
from shardmark.world import World

SHAPES = ((5, 3), (7,), (), (1,), (2, 1, 3), (33,), (130,), (64, 9))


def random_script(draw: Random, length: int) -> Script:
    def group() -> Group:
        return Group(draw.choices(SHAPES, k=draw.randint(1, 4)), options())

    def options() -> Options:
        some: Options = {"lr": draw.choice([0.0, 0.01, 0.3]), "weight_decay": draw.choice([0.0, 0.2])}
        return {name: value for name, value in some.items() if draw.random() < 0.5}

    def action() -> object:
        match draw.randrange(10):
            case 0:
                return Add(group())
            case 1:
                return Reload()
            case 2:
                return Save()
            case 3:
                return Change(draw.randrange(3), options())
            case _:
                return Step(without=tuple(i for i in range(6) if draw.random() < 0.2))

    optimizer, defaults = draw.choice(list(OPTIMIZERS.values()))
    groups = [group() for _ in range(draw.randint(1, 3))]
    return Script(groups, [*(action() for _ in range(length)), Step()], optimizer, defaults, seed=draw.randrange(1000))


@pytest.mark.family("sharded_optimizer")
@pytest.mark.parametrize("scripts", [12, pytest.param(300, marks=pytest.mark.sweep)])
def test_any_script_ends_as_without_sharding(
    implementation: Implementation, world: World, scripts: int, device: str
) -> None:
    """The shortest first, so that a failure shows a short one."""
    draw = Random(torch.initial_seed())
    for i in range(scripts):
        script = random_script(draw, 1 + 8 * i // scripts)
        found = world.run(play_on_rank, implementation, script, device)
        try:
            assert_played(found, play(unsharded, script, device))
        except AssertionError as error:
            raise AssertionError(f"{error}\nof {script}") from None
