"""State of a sharded optimizer: loaded on the same ranks, on another number of ranks, and by the unsharded
optimizer."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.engine.histories import play
from correctness.sharded_optimizer.events import Change, Reload, Restore, Save, Step
from correctness.sharded_optimizer.player import (
    Beside,
    assert_state,
    assert_values,
    check,
    checkpoint_after,
)
from correctness.sharded_optimizer.sharding import parameters, raised, set_gradients
from correctness.sharded_optimizer.training import Group, History, Training, unsharded
from correctness.sharded_optimizer.unusual_optimizers import Counting, CountingInGroups, Wide
from correctness.support.contracts import changed_in_state, renumbered
from shardmark.api import Implementation
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

GROUPS = (
    Group([(5, 3), (7,), ()]),
    Group([(4, 4), (3,)], {"lr": 0.3, "weight_decay": 0.2}),
    Group([()], {"lr": 0.2}),  # one rank has all of it
)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "counting_in_groups": (CountingInGroups, {"lr": 0.1}),
}


def history(optimizer: str, *events: Any, seed: int = 0) -> History:
    cls, defaults = OPTIMIZERS[optimizer]
    return History(GROUPS, events, cls, defaults, seed=seed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_is_the_optimizers_own_on_every_rank(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    check(implementation, world, history(optimizer, Step(), Change(0, {"lr": 0.02}), Step((1,)), Save()), device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_trains_on_as_if_never_saved(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    check(implementation, world, history(optimizer, Step(), Step((3,)), Reload(), Step(), Step(), Save()), device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_back_to_a_saved_state(
    implementation: Implementation, world: World, optimizer: str, device: str
) -> None:
    """After more steps, which have counted on and moved the moments."""
    check(
        implementation,
        world,
        history(optimizer, Step(), Save(), Step(), Step(), Step(), Restore(), Step(), Step(), Save()),
        device,
    )


def options_after_loading(implementation: Implementation, device: str) -> list[tuple[Any, ...]]:
    def make(lr: float, **options: Any) -> Any:
        a, b = parameters(device, (5,), (3,))
        groups = [{"params": [a], **options}, {"params": [b], "lr": lr / 10}]
        return implementation.watched(groups, torch.optim.Adam, lr=lr)

    saved = make(0.5, betas=(0.1, 0.2), weight_decay=0.3)
    saved.param_groups[0]["initial_lr"] = 0.7  # as a scheduler adds it
    loading = make(1.0)
    loading.load_state_dict(deepcopy(saved.state_dict()))
    names = ("lr", "betas", "weight_decay", "initial_lr")
    return [tuple(group.get(name) for name in names) for group in loading.param_groups]


def test_a_loaded_state_brings_its_options(implementation: Implementation, world: World, device: str) -> None:
    expected = [(0.5, (0.1, 0.2), 0.3, 0.7), (0.05, (0.9, 0.999), 0, None)]
    for rank, found in enumerate(world.run(options_after_loading, implementation, device)):
        found = [(lr, tuple(betas), *rest) for lr, betas, *rest in found]
        assert found == expected, f"after loading, rank {rank} has lr, betas, weight_decay, initial_lr {found}"


def test_state_that_is_no_tensor_is_saved_and_loaded(implementation: Implementation, world: World, device: str) -> None:
    counting = History(GROUPS[:1], [Step(), Step(without=(0,)), Reload(), Step(), Step()], Counting)
    check(implementation, world, counting, device)


def test_a_state_loads_on_another_number_of_ranks(
    implementation: Implementation, world: World, worlds: WorldsBySize, device: str
) -> None:
    before, after = history("adamw", Step(), Step(), Save()), history("adamw", Step(), Step((0, 4)), seed=1)
    check(implementation, world, before, device)
    saved = world.run(checkpoint_after, implementation, before, device)[0]
    for ranks in {1, 2, 3} - {world.size}:
        check(implementation, worlds(ranks), after, device, partial(Beside, start=saved))


def test_the_optimizer_itself_loads_the_state_and_the_other_way_round(
    implementation: Implementation, world: World, device: str
) -> None:
    before, after = history("momentum", Step(), Step()), history("momentum", Step(), Step(), seed=1)
    own = checkpoint_after(None, before, device)
    saved = world.run(checkpoint_after, implementation, before, device)[0]
    beside = Beside(None, after, device, start=own)
    beside.found = Training(unsharded, after, device, saved)
    assert (problem := play(beside, after)) is None, problem
    check(implementation, world, after, device, partial(Beside, start=own))


def divisions(parameters: int) -> list[list[int]]:
    """Yield each way to divide that many parameters into groups, in order, as group sizes."""
    rest = [[first, *more] for first in range(1, parameters) for more in divisions(parameters - first)]
    return [*rest, [parameters]]


def in_groups(division: list[int], device: str) -> list[dict[str, Any]]:
    params = iter(parameters(device, *((i + 1, 2) for i in range(sum(division)))))
    return [{"params": list(islice(params, n))} for n in division]


def load_what_does_not_fit(implementation: Implementation, device: str) -> list[str]:
    """Load states whose division into groups does not fit (same count, one more, one less); return errors that are not
    ValueError."""
    wrong = []
    for own in ([3], [2, 1], [1, 1, 1], [1, 2]):
        groups = in_groups(own, device)
        optimizer = implementation.watched(groups, torch.optim.Adam)
        for other in (division for n in (2, 3, 4) for division in divisions(n) if division != own):
            saved = torch.optim.Adam(in_groups(other, device))
            set_gradients([p for group in saved.param_groups for p in group["params"]], 0)
            saved.step()
            line = raised(lambda saved=saved, load=optimizer.load_state_dict: load(saved.state_dict()))
            if not line.startswith("ValueError"):
                wrong.append(f"{line} for a state whose groups have {other} parameters, where its own have {own}")
    return wrong


@pytest.mark.should("a state that does not fit is a ValueError on every rank")
def test_a_state_that_does_not_fit_is_refused_on_every_rank(
    implementation: Implementation, world: World, device: str
) -> None:
    for rank, wrong in enumerate(world.run(load_what_does_not_fit, implementation, device)):
        assert not wrong, (
            f"load_state_dict must raise ValueError on rank {rank}, and in {len(wrong)} cases does not: "
            f"it raised {wrong[0]}"
        )


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, id="bfloat16"), pytest.param(torch.float32, id="float32", marks=pytest.mark.judged)],
)
def test_a_state_is_loaded_as_the_optimizer_loads_it(
    implementation: Implementation, world: World, dtype: torch.dtype, device: str
) -> None:
    """For an optimizer that keeps and loads a state wider than its parameters: each load keeps every bit."""
    events = [Step(), Step((1,)), Reload(), Step(), Save(), Step(), Restore(), Reload(), Step(), Save()]
    wide = History(GROUPS[:1] * 2, events, Wide, {"lr": 0.01}, [dtype])
    check(implementation, world, wide, device)
    start = checkpoint_after(None, wide, device)
    check(
        implementation,
        world,
        replace(wide, events=[Reload(), Step(), Step()], seed=1),
        device,
        partial(Beside, start=start),
    )


def changed_by_loading(implementation: Implementation, device: str) -> str:
    """Compare a state dict before and after it is loaded, as a caller may load it again, or save it."""
    own = parameters(device, (5,), (3, 2), (4,))
    optimizer = implementation.watched(own, torch.optim.AdamW)
    for step in range(2):
        set_gradients(own, step)
        optimizer.step()
    given = optimizer.state_dict()
    before = deepcopy(given)
    optimizer.load_state_dict(given)
    return changed_in_state(before, given)


def test_loading_changes_nothing_of_what_is_loaded(implementation: Implementation, world: World, device: str) -> None:
    for changed in world.run(changed_by_loading, implementation, device):
        assert not changed, f"load_state_dict changes what it is given: {changed}"


def after_two_steps() -> list[nn.Parameter]:
    """Parameters after two steps of SGD without memory of the first: with the gradients of seeds 0 and 1."""
    params = parameters("cpu", (5,), (3, 2), (4,))
    for seed in (0, 1):
        set_gradients(params, seed)
        torch.optim.SGD(params, lr=0.1).step()
    return params


def move_data(implementation: Implementation, device: str) -> tuple[str, list[Tensor]]:
    """Give parameters other memory between steps, as averaged weights are swapped in; return the error, if any."""
    params = parameters(device, (5,), (3, 2), (4,))
    optimizer = implementation.watched(params, torch.optim.SGD, lr=0.1)
    line = "nothing"
    for seed in (0, 1):
        set_gradients(params, seed)
        line = raised(optimizer.step)
        for p in params:
            p.data = p.data.clone()
    return line, [p.detach().cpu() for p in params]


def test_parameters_with_other_data_are_updated_or_an_error(
    implementation: Implementation, world: World, device: str, request: pytest.FixtureRequest
) -> None:
    if implementation.name == "zero_redundancy":
        request.applymarker(pytest.mark.xfail(reason="its views keep the old data: docs/pytorch-defects.md"))
    ranks = world.run(move_data, implementation, device)
    lines = {line for line, _ in ranks}
    if lines == {"nothing"}:
        assert_values([found for _, found in ranks], after_two_steps())
    else:
        assert "nothing" not in lines, f"only some ranks refuse parameters whose .data is another: {lines}"


def load_another(make: Any, how: str, device: str) -> dict[str, Any]:
    """Return the state after loading another's and taking one step: "wider", of float64 parameters into bfloat16 ones,
    or "renumbered", under other ids."""
    shapes = ((5,), (3, 2), (4,))
    dtypes = (torch.float64, torch.bfloat16) if how == "wider" else (None, None)
    theirs, own = (parameters(device, *shapes, dtype=dtype) for dtype in dtypes)
    saved = torch.optim.AdamW(theirs)
    set_gradients(theirs, 0)
    saved.step()
    optimizer, state = make(own, torch.optim.AdamW), deepcopy(saved.state_dict())
    optimizer.load_state_dict(renumbered(state) if how == "renumbered" else state)
    set_gradients(own, 1)
    optimizer.step()
    return deepcopy(optimizer.state_dict())


def load_another_on_rank(implementation: Implementation, how: str, device: str) -> dict[str, Any]:
    return load_another(implementation.watched, how, device)


def assert_loaded(implementation: Implementation, world: World, how: str, device: str) -> None:
    expected = load_another(unsharded, how, device)
    for rank, found in enumerate(world.run(load_another_on_rank, implementation, how, device)):
        assert_state(found, expected, f"on rank {rank}")


def test_a_state_of_another_dtype_becomes_the_parameters(
    implementation: Implementation, world: World, device: str
) -> None:
    """torch's optimizers cast the state they load to the parameter's dtype."""
    assert_loaded(implementation, world, "wider", device)


def test_the_ids_of_a_state_are_those_of_its_groups(implementation: Implementation, world: World, device: str) -> None:
    assert_loaded(implementation, world, "renumbered", device)


def load_twice(implementation: Implementation, device: str) -> list[Tensor]:
    """Load the state into an optimizer that has made steps already: its own state must be gone."""
    params = parameters(device, (5,), (3, 2), (4,))
    optimizer = implementation.watched(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    empty = deepcopy(optimizer.state_dict())
    set_gradients(params, 0)
    optimizer.step()
    optimizer.load_state_dict(empty)
    set_gradients(params, 1)
    optimizer.step()
    return [p.detach().cpu() for p in params]


def test_loading_replaces_the_state_there_was(implementation: Implementation, world: World, device: str) -> None:
    assert_values(world.run(load_twice, implementation, device), after_two_steps())
