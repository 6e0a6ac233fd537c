"""Contract of uses of a sharded optimizer: hooks, sparse gradients, some that are not finite, parameters frozen before
a step, and their names; what it refuses, and options that a closure sets."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.sharded_optimizer.events import Overflow, Save, Step
from correctness.sharded_optimizer.player import assert_values, check
from correctness.sharded_optimizer.sharding import parameters, raised, set_gradients
from correctness.sharded_optimizer.training import Group, History, unsharded
from correctness.support.complaints import assert_none
from shardmark.api import Implementation, NotAsked
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("sharded_optimizer")


def hooked(make: Any, device: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Train with a hook that halves gradients before each step, and one that reads parameters after it. Return which
    ran, the parameters that the last hook saw, and those at the end."""
    params = parameters(device, (5, 3), (7,), (11,))
    optimizer = make(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    ran: list[str] = []
    seen: list[Tensor] = []

    def before(*_: Any) -> None:
        ran.append("before")
        for p in params:
            p.grad.mul_(0.5)  # type: ignore[union-attr]

    def after(*_: Any) -> None:
        ran.append("after")
        seen[:] = [p.detach().cpu().clone() for p in params]

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    return ran, seen, [p.detach().cpu() for p in params]


def hooked_on_rank(implementation: Implementation, device: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    return hooked(implementation.watched, device)


def test_hooks_run_once_around_each_step(implementation: Implementation, world: World, device: str) -> None:
    ranks, (expected, _, values) = world.run(hooked_on_rank, implementation, device), hooked(unsharded, device)
    for rank, (ran, _, _) in enumerate(ranks):
        assert ran == expected, f"in two steps the hooks on rank {rank} ran {ran}, expected {expected}"
    assert_values([found for *_, found in ranks], values, ", whose gradients a hook halves before each step")
    assert_values([seen for _, seen, _ in ranks], values, ", as a hook after the step sees it")


def with_sparse(make: Any, device: str) -> tuple[list[str], list[Tensor]]:
    """Step with a dense gradient, and with sparse ones: of some rows, of one row twice, and of none."""
    params = parameters(device, (6, 3), (5,))
    optimizer = make(params, torch.optim.SGD, lr=0.1)
    said = []
    for step, rows in enumerate(([4, 1], [2, 2], [])):
        set_gradients(params, step)
        values = torch.ones(len(rows), 3, dtype=params[0].dtype, device=device)
        params[0].grad = torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64, device=device), values, (6, 3), check_invariants=False
        )
        said.append(raised(optimizer.step))
    return said, [p.detach().cpu() for p in params]


def with_sparse_on_rank(implementation: Implementation, device: str) -> tuple[list[str], list[Tensor]]:
    return with_sparse(implementation.watched, device)


def test_a_sparse_gradient_is_right_or_refused(implementation: Implementation, world: World, device: str) -> None:
    ranks = world.run(with_sparse_on_rank, implementation, device)
    said = [lines for lines, _ in ranks]
    if said[0] == ["nothing"] * 3:
        assert_values([found for _, found in ranks], with_sparse(unsharded, device)[1], " after sparse gradients")
    else:
        assert all(line != "nothing" for lines in said for line in lines), (
            f"a step with a sparse gradient must be right, or an error on every rank, and said {said}"
        )


def frozen_before_a_step(make: Any, device: str) -> list[Tensor]:
    """Two steps; before the second one a parameter is frozen that has its gradient."""
    params = parameters(device, (7,), (4, 3))
    optimizer = make(params, torch.optim.SGD, lr=0.1)
    for step in range(2):
        set_gradients(params, step)
        params[0].requires_grad_(step == 0)
        optimizer.step()
    return [p.detach().cpu() for p in params]


def frozen_on_rank(implementation: Implementation, device: str) -> list[Tensor]:
    return frozen_before_a_step(implementation.watched, device)


def test_a_parameter_that_is_frozen_after_backward_is_updated_on_every_rank(
    implementation: Implementation, world: World, device: str, request: pytest.FixtureRequest
) -> None:
    if implementation.spec == "zero_redundancy" and world.size > 1:
        request.applymarker(pytest.mark.xfail(reason="only its owner updates it: docs/pytorch-defects.md", strict=True))
    ranks = world.run(frozen_on_rank, implementation, device)
    assert_values(ranks, frozen_before_a_step(unsharded, device), ", one of which was frozen after backward")


def options_on_rank(implementation: Implementation, device: str) -> str:
    """A line if a group that was just added lacks an option."""
    optimizer = implementation.watched(parameters(device, (7,)), torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": parameters(device, (4, 3))})
    everywhere = {"param_groups": optimizer.param_groups, "state_dict()": optimizer.state_dict()["param_groups"]}
    for where, groups in everywhere.items():
        first, added = ({name: x for name, x in each.items() if name != "params"} for each in groups)
        if first != added:
            return f"an added group has in {where} {added}, expected {first}"
    return ""


def test_an_added_group_has_the_default_options_at_once(
    implementation: Implementation, world: World, device: str, request: pytest.FixtureRequest
) -> None:
    if implementation.spec == "zero_redundancy":
        why = "they come with the next step: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    assert_none(filter(None, world.run(options_on_rank, implementation, device)))


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_rank_steps_where_a_gradient_is_not_finite(
    implementation: Implementation, world: World, dtype: torch.dtype, value: float, device: str
) -> None:
    """As the unsharded optimizer does: what a loss scaler leaves out is its own."""
    groups, events = [Group([(5, 3), (7,), (11,)])], [Step(), Overflow(value), Save()]
    check(implementation, world, History(groups, events, dtypes=[dtype]), device)


def names_in_state(make: Any, device: str) -> list[Any]:
    params = parameters(device, (5, 3), (7,), (11,))
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1]), ("c", params[2])], "lr": 0.3}]
    return [group.get("param_names") for group in make(groups, torch.optim.SGD, lr=0.1).state_dict()["param_groups"]]


def names_on_rank(implementation: Implementation, device: str) -> list[Any]:
    return names_in_state(implementation.watched, device)


def test_a_state_has_the_names_of_parameters(
    implementation: Implementation, world: World, device: str, request: pytest.FixtureRequest
) -> None:
    if implementation.spec == "zero_redundancy":
        request.applymarker(pytest.mark.xfail(reason="it takes no names: docs/pytorch-defects.md", strict=True))
    expected = names_in_state(unsharded, device)
    for rank, found in enumerate(world.run(names_on_rank, implementation, device)):
        assert found == expected, f"param_names in state_dict() are {found} on rank {rank}, expected {expected}"


def after_refusals(implementation: Implementation, device: str) -> tuple[list[str], list[Tensor]]:
    """Errors of a parameter that is there already and of a state of fewer, and parameters after one more group and a
    step."""
    *own, another = parameters(device, *REFUSED)
    optimizer = implementation.watched(own, torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(own[:1], lr=0.7).state_dict()
    lines = [
        raised(lambda: optimizer.add_param_group({"params": own[:1]})),
        raised(lambda: optimizer.load_state_dict(other)),
    ]
    if "nothing" not in lines:
        optimizer.add_param_group({"params": [another]})
        set_gradients([*own, another], 0)
        optimizer.step()
    return lines, [p.detach().cpu() for p in (*own, another)]


REFUSED = ((5,), (4,), (6,))


def test_what_is_refused_leaves_no_trace(implementation: Implementation, world: World, device: str) -> None:
    ranks = world.run(after_refusals, implementation, device)
    if "nothing" in ranks[0][0]:
        raise NotAsked(f"it refuses not both: {ranks[0][0]}")
    params = parameters("cpu", *REFUSED)
    set_gradients(params, 0)
    torch.optim.SGD(params, lr=0.1).step()
    assert_values([found for _, found in ranks], params, ", after a group and a state that were refused")


def test_options_that_a_closure_sets_hold_in_its_step(
    implementation: Implementation, world: World, device: str, request: pytest.FixtureRequest
) -> None:
    if implementation.spec == "zero_redundancy":
        why = "it copies options before it calls the closure: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    events = [Step(closure=True), Step(closure=True, sets={"lr": 0.5}), Step()]
    check(implementation, world, History([Group([(5, 3), (3,)])], events), device)
