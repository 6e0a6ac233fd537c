"""State of a sharded optimizer, saved and loaded: on the same ranks, on others, and by the optimizer itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.optimizer_scripts import (
    Change,
    Group,
    Reload,
    Save,
    Script,
    Step,
    assert_played,
    assert_state,
    assert_value,
    play,
    play_from,
    play_on_rank,
    unsharded,
)
from correctness.support.sharding import parameters, raised, set_gradients
from shardmark.plugin import WorldsBySize
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

GROUPS = (Group([(5, 3), (7,), ()]), Group([(4, 4), (3,)], {"lr": 0.3, "weight_decay": 0.2}))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
}


def script(optimizer: str, *actions: Any, seed: int = 0) -> Script:
    cls, defaults = OPTIMIZERS[optimizer]
    return Script(GROUPS, actions, cls, defaults, seed=seed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_is_the_optimizers_own(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    saving = script(optimizer, Step(), Change(0, {"lr": 0.02}), Step(without=(1,)))
    found = world.run(play_on_rank, implementation, saving, device)
    assert_state(found[0].state, play(unsharded, saving, device).state, "on rank 0")


def test_the_state_is_the_same_on_every_rank(implementation: Implementation, world: World, device: str) -> None:
    first, *others = world.run(play_on_rank, implementation, script("adamw", Step(), Step()), device)
    for rank, found in enumerate(others, 1):
        assert_state(found.state, first.state, f"on rank {rank}, where rank 0's is expected")


def test_saving_changes_nothing(implementation: Implementation, world: World, device: str) -> None:
    saving = script("adamw", Save(), Step(), Save(), Save(), Step(), Step())
    assert_played(world.run(play_on_rank, implementation, saving, device), play(unsharded, saving, device))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_trains_on_as_if_never_saved(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    saving = script(optimizer, Step(), Step(without=(3,)), Reload(), Step(), Step())
    found = world.run(play_on_rank, implementation, saving, device)
    assert_played(found, play(unsharded, saving, device))
    assert_state(found[0].state, play(unsharded, saving, device).state, "after loading, on rank 0")


def test_a_state_without_steps_loads(implementation: Implementation, world: World, device: str) -> None:
    saving = script("adamw", Reload(), Step(), Step())
    assert_played(world.run(play_on_rank, implementation, saving, device), play(unsharded, saving, device))


def options_after_loading(implementation: Implementation, device: str) -> list[tuple[Any, ...]]:
    def make(lr: float, **options: Any) -> Any:
        a, b = parameters(device, (5,), (3,))
        groups = [{"params": [a], **options}, {"params": [b], "lr": lr / 10}]
        return implementation.adapted(groups, torch.optim.Adam, lr=lr)

    saved = make(0.5, betas=(0.1, 0.2), weight_decay=0.3)
    saved.param_groups[0]["initial_lr"] = 0.7  # a scheduler's
    loading = make(1.0)
    loading.load_state_dict(deepcopy(saved.state_dict()))
    names = ("lr", "betas", "weight_decay", "initial_lr")
    return [tuple(group.get(name) for name in names) for group in loading.param_groups]


def test_a_loaded_state_brings_its_options(implementation: Implementation, world: World, device: str) -> None:
    expected = [(0.5, (0.1, 0.2), 0.3, 0.7), (0.05, (0.9, 0.999), 0, None)]
    for rank, found in enumerate(world.run(options_after_loading, implementation, device)):
        found = [(lr, tuple(betas), *rest) for lr, betas, *rest in found]
        assert found == expected, f"after loading, rank {rank} has lr, betas, weight_decay, initial_lr {found}"


class Counting(torch.optim.Optimizer):
    """Its state has a number, a word, a tensor without dimensions and one of the parameter's shape."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(steps=0, phase="odd", rate=torch.ones((), dtype=p.dtype), sum=torch.zeros_like(p))
                state["steps"] += 1
                state["phase"] = "odd" if state["steps"] % 2 else "even"
                state["rate"] = state["rate"] * (0.5 if state["phase"] == "even" else 0.9)
                state["sum"] += p.grad
                p.sub_(group["lr"] * state["rate"].item() / state["steps"] * state["sum"])


def test_state_that_is_no_tensor_is_saved_and_loaded(implementation: Implementation, world: World, device: str) -> None:
    counting = Script(GROUPS[:1], [Step(), Step(without=(0,)), Reload(), Step(), Step()], Counting)
    assert_played(world.run(play_on_rank, implementation, counting, device), play(unsharded, counting, device))


def test_a_state_loads_on_another_number_of_ranks(
    implementation: Implementation, world: World, worlds: WorldsBySize, device: str
) -> None:
    before, after = script("adamw", Step(), Step()), script("adamw", Step(), Step(without=(0, 4)), seed=1)
    saved = world.run(play_on_rank, implementation, before, device)[0]
    expected = play_from(None, after, device, play(unsharded, before, device))
    for ranks in {1, 2, 3} - {world.size}:
        assert_played(worlds(ranks).run(play_from, implementation, after, device, saved), expected)


def test_the_optimizer_itself_loads_the_state_and_the_other_way_round(
    implementation: Implementation, world: World, device: str
) -> None:
    before, after = script("momentum", Step(), Step()), script("momentum", Step(), Step(), seed=1)
    own = play(unsharded, before, device)
    expected = play_from(None, after, device, own)
    saved = world.run(play_on_rank, implementation, before, device)[0]
    assert_played([play_from(None, after, device, saved)], expected)
    assert_played(world.run(play_from, implementation, after, device, own), expected)


def load_what_does_not_fit(implementation: Implementation, device: str) -> list[str]:
    """What loading states of other models raises, by what is wrong."""
    params = parameters(device, (5,), (3, 2))
    optimizer = implementation.adapted(params, torch.optim.Adam)
    set_gradients(params, 0)
    optimizer.step()
    (group,) = optimizer.state_dict()["param_groups"]
    state = optimizer.state_dict()["state"]
    others = {
        "fewer parameters": {"state": {0: state[0]}, "param_groups": [group | {"params": [0]}]},
        "more parameters": {"state": state, "param_groups": [group | {"params": [0, 1, 2]}]},
        "two groups": {"state": state, "param_groups": [group | {"params": [0]}, group | {"params": [1]}]},
    }
    lines = {what: raised(lambda other=other: optimizer.load_state_dict(other)) for what, other in others.items()}
    return [f"{what}: {line}" for what, line in lines.items() if not line.startswith("ValueError")]


def test_a_state_that_does_not_fit_is_refused_on_every_rank(
    implementation: Implementation, world: World, device: str
) -> None:
    for rank, wrong in enumerate(world.run(load_what_does_not_fit, implementation, device)):
        assert not wrong, f"load_state_dict must raise ValueError on rank {rank}; it raised {'; '.join(wrong)}"


def load_twice(implementation: Implementation, device: str) -> list[Tensor]:
    """The state is loaded into an optimizer that has made steps already: what it had is gone."""
    params = parameters(device, (5,), (3, 2), (4,))
    optimizer = implementation.adapted(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    empty = deepcopy(optimizer.state_dict())
    set_gradients(params, 0)
    optimizer.step()
    optimizer.load_state_dict(empty)
    set_gradients(params, 1)
    optimizer.step()
    return [p.detach().cpu() for p in params]


def test_loading_replaces_the_state_there_was(implementation: Implementation, world: World, device: str) -> None:
    params = parameters("cpu", (5,), (3, 2), (4,))
    for seed in (0, 1):
        set_gradients(params, seed)
        torch.optim.SGD(params, lr=0.1).step()
    for rank, found in enumerate(world.run(load_twice, implementation, device)):
        for i, (x, p) in enumerate(zip(found, params, strict=True)):
            assert_value(f"parameter {i} on rank {rank}", x, p.detach())
