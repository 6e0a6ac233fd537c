"""Whatever is done with a sharded optimizer, in any order: random parameters, groups, changes, frozen
parameters, closures, and states loaded; on all ranks, or on groups of them side by side.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from correctness.sharded_optimizer.events import (
    Add,
    Change,
    Freeze,
    Group,
    Options,
    Played,
    Reload,
    Restore,
    Save,
    Script,
    Step,
    play,
    play_in_groups,
    play_on_rank,
    unsharded,
)
from correctness.sharded_optimizer.outcomes import assert_played, assert_state
from correctness.sharded_optimizer.unusual_optimizers import OPTIMIZERS, Wide
from shardmark.api import Implementation
from shardmark.ranks.world import World

SHAPES = ((5, 3), (7,), (), (1,), (2, 1, 3), (33,), (130,), (64, 9), (0, 4))


PLAYED = {**OPTIMIZERS, "wide": (Wide, {"lr": 0.05})}
OF_ITS_OWN: dict[type[torch.optim.Optimizer], dict[str, list[Any]]] = {
    torch.optim.SGD: {"momentum": [0.5, 0.7], "maximize": [True]},
    torch.optim.Adam: {"betas": [(0.5, 0.6)], "maximize": [True]},
    torch.optim.AdamW: {"betas": [(0.5, 0.6)], "maximize": [True]},
    torch.optim.Adagrad: {"eps": [0.1], "maximize": [True]},
    Wide: {"momentum": [0.0, 0.5]},
}
"""Options beside the learning rate and weight decay, which few scripts make an optimizer with."""


def random_script(draw: Random, length: int) -> Script:
    def some(n: int, chance: float) -> tuple[int, ...]:
        return tuple(i for i in range(n) if draw.random() < chance)

    def group() -> Group:
        shapes = draw.choices(SHAPES, k=draw.randint(1, 4))
        return Group(shapes, options(), some(4, 0.2), transposed=draw.random() < some_layouts)

    def options() -> Options:
        values = {"lr": [0.0, 0.01, 0.3], "weight_decay": [0.0, 0.2], **OF_ITS_OWN[optimizer]}
        return {name: draw.choice(each) for name, each in values.items() if draw.random() < 0.4}

    def action() -> object:
        match draw.randrange(14):
            case 0:
                return Add(group())
            case 1:
                return Reload()
            case 2:
                return Save()
            case 3:
                return Restore()
            case 4 | 5:
                return Change(draw.randrange(3), options())
            case 6:
                return Freeze(draw.randrange(8))
            case _:
                return Step(
                    some(6, 0.2),
                    draw.random() < 0.3,
                    some(8, draw.choice([0.0, 0.0, 0.3])),
                    draw.random() < some_layouts,
                )

    optimizer, defaults = draw.choice(list(PLAYED.values()))
    # torch's fused AdamW takes gradients laid out as their parameters; on CPU it misreads others.
    some_layouts = 0.0 if defaults.get("fused") else 0.2
    wide, half = torch.float64, torch.bfloat16
    dtypes = draw.choice([[wide], [half], [half, wide]] if optimizer is Wide else [[wide], [wide, torch.float32]])
    groups = [group() for _ in range(draw.randint(1, 3))]
    ends = [[Step()], [Step(), Freeze(None), Step()], [Step(), Reload(), Step()]]
    actions = [*(action() for _ in range(length)), *draw.choice(ends)]
    return Script(groups, actions, optimizer, defaults, dtypes, seed=draw.randrange(1000))


def check(found: list[Played], script: Script, device: str) -> None:
    expected = play(unsharded, script, device)
    assert_played(found, expected)
    with_elements = {i for i, p in enumerate(expected.parameters[-1]) if p.numel()}
    for rank, played in enumerate(found):
        assert_state(
            played.state,
            expected.state,
            f"in the end, on rank {rank} of {len(found)}",
            expected.updated & with_elements,
        )


@pytest.mark.family("sharded_optimizer")
@pytest.mark.examples(12, 30, 300)
def test_any_script_ends_as_without_sharding(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    """The shortest first, so that a failure shows a short one; every third by even and odd ranks, in groups."""
    draw = Random(torch.initial_seed())
    for i in range(examples):
        script = random_script(draw, 1 + 8 * i // examples)
        in_groups = i % 3 == 2
        if in_groups:
            script = replace(script, actions=[*script.actions, Reload(), Step()])
        found = world.run(play_in_groups if in_groups else play_on_rank, implementation, script, device)
        try:
            if in_groups:
                for first in range(min(world.size, 2)):
                    check(found[first::2], replace(script, seed=first), device)
            else:
                check(found, script, device)
        except AssertionError as error:
            where = "by even and odd ranks in process groups of their own" if in_groups else "by all ranks"
            raise AssertionError(f"{error}\nof {script}, played {where}") from None
