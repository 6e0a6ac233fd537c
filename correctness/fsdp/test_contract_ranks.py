"""Contract between ranks: process groups, slow collectives, clipping, and modules that are refused."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from correctness.engine.histories_on_ranks import group_of
from correctness.fsdp.checks import (
    HANG,
    ODD_MODULES,
    Odd,
    SGDs,
    as_expected,
    assert_none,
    averaged_gradients,
    backward,
    both,
    full,
    gradients_as_expected,
    gradients_of,
    make,
    norm_tolerance,
    parameters_as_expected,
    poisoned,
    synchronized_backward,
    whole_backward,
    wrap,
)
from correctness.support.communication import delayed
from correctness.support.contracts import is_ours
from correctness.support.whole_batch import batch, loss
from impl.fsdp import whole
from shardmark.api import Implementation, NotAsked
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")


def in_groups(implementation: Implementation, groups: list[list[int]], device: str) -> str:
    """Each group trains its own model, starting from its first rank's weights; other ranks are idle."""
    mine = None
    for ranks in groups:
        group = group_of(tuple(ranks))
        if dist.get_rank() in ranks:
            mine, first = group, ranks[0]
    problem = ""
    if mine is not None:
        model = wrap(implementation, make(Odd, dist.get_rank(), device), process_group=mine)
        plain = make(Odd, first, device)
        problem = parameters_as_expected("the group's first rank's", model, plain, tolerance=0)
        whole_backward(plain, 0, device, mine)
        synchronized_backward(model, 0, device, mine)
        found, expected = averaged_gradients(model), gradients_of(plain)
        problem = problem or as_expected("the mean over the group's ranks of the gradient of", found, expected)
    return problem


@pytest.mark.parametrize("side_by_side", [True, False], ids=["side_by_side", "some_ranks_are_in_none"])
def test_groups_that_are_not_the_world(
    implementation: Implementation, world: World, side_by_side: bool, device: str
) -> None:
    last = world.size - 1
    first = [0] if world.size > 1 else []
    groups = [first, list(range(1, world.size))] if side_by_side else [[0, last] if world.size > 2 else [last]]
    assert_none(world.run(in_groups, implementation, [g for g in groups if g] or [[0]], device, deadline=HANG))


@poisoned
def slow_on_rank(implementation: Implementation, slow: int, device: str) -> str:
    """Take two steps while one rank starts every collective late; uninitialized memory is NaN."""
    model, plain = both(implementation, Odd, device)
    optimizers = SGDs(plain, model)
    for step in range(2):
        optimizers.zero_grad()
        whole_backward(plain, step, device)
        with delayed(before=0.01, on=slow):
            backward(model, step, device)
            model.finish_gradient_synchronization()
            optimizers.step()
    return parameters_as_expected(f"where rank {slow} starts its collectives late,", model, plain)


def test_collectives_may_be_slow(implementation: Implementation, world: World, device: str) -> None:
    for slow in {0, world.size - 1}:
        assert_none(world.run(slow_on_rank, implementation, slow, device))


def same_on_rank(implementation: Implementation, device: str) -> dict[str, torch.Tensor]:
    model = wrap(implementation, make(Odd, 0, device))
    optimizers = SGDs(model)
    for step in range(2):
        optimizers.zero_grad()
        synchronized_backward(model, step, device)
        optimizers.step()
    return full(model)


def test_every_rank_gathers_the_same_parameters(implementation: Implementation, world: World, device: str) -> None:
    ranks = world.run(same_on_rank, implementation, device)
    assert_none([as_expected("rank 0's", found, ranks[0], tolerance=0) for found in ranks])


@poisoned
def clip_on_rank(implementation: Implementation, name: str, max_norm: float, device: str) -> str:
    kind = ODD_MODULES[name]
    model, plain = both(implementation, kind, device, wrap=whole)
    if not hasattr(model, "clip_grad_norm_"):
        raise NotAsked("it has no clip_grad_norm_(), which may be left out")
    whole_backward(plain, 0, device)
    synchronized_backward(model, 0, device)
    norm = float(model.clip_grad_norm_(max_norm))
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    if not abs(norm - expected) <= norm_tolerance() * expected:
        return f"clip_grad_norm_() returns {norm:.9g}, and the norm of all gradients over all ranks is {expected:.9g}"
    return gradients_as_expected(f"clipped to {max_norm}, the gradient of", model, plain, tolerance=norm_tolerance())


@pytest.mark.parametrize("max_norm", [0.05, 100.0], ids=["too_large", "small_enough"])
@pytest.mark.parametrize("name", ["odd", "tiny"])
def test_clipping_is_by_the_norm_over_all_ranks(
    implementation: Implementation, world: World, name: str, max_norm: float, device: str
) -> None:
    assert_none(world.run(clip_on_rank, implementation, name, max_norm, device, deadline=HANG))


def not_finite_on_rank(implementation: Implementation, value: float, device: str) -> str:
    """Multiply the last rank's loss by `value`, which is infinite or NaN; the other ranks have their own losses."""
    model, plain = both(implementation, Odd, device, wrap=whole)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for each, (x, y) in enumerate(zip(*(of.chunk(ranks) for of in batch(0, ranks, device)), strict=True)):
        times = value if each == ranks - 1 else 1.0
        (times * loss(plain, x, y) / ranks).backward()
        if each == rank:
            (times * loss(model, x, y)).backward()
    model.finish_gradient_synchronization()
    found, expected = averaged_gradients(model), gradients_of(plain)
    for name, right in expected.items():
        if not torch.equal(found[name].isfinite(), right.isfinite()):
            return (
                f"where one rank's loss is {value}, the gradient of {name} is {found[name].flatten()[:3].tolist()} ..."
            )
    norm = float(model.clip_grad_norm_(1.0)) if hasattr(model, "clip_grad_norm_") else value
    return "" if not math.isfinite(norm) else f"where one rank's loss is {value}, clip_grad_norm_() returns {norm}"


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_on_one_rank_is_not_on_any(
    implementation: Implementation, world: World, value: float, device: str
) -> None:
    assert_none(world.run(not_finite_on_rank, implementation, value, device, deadline=HANG))


def clip_half_on_rank(implementation: Implementation, device: str) -> str:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8)).to(device, torch.float16)
    model = wrap(implementation, copy.deepcopy(plain), wrap=whole)
    if not hasattr(model, "clip_grad_norm_"):
        raise NotAsked("it has no clip_grad_norm_(), which may be left out")
    for each in (plain, model):
        (64 * each(torch.ones(4, 8, dtype=torch.float16, device=device))).sum().backward()
    model.finish_gradient_synchronization()
    norm, expected = (
        float(each) for each in (model.clip_grad_norm_(8.0), nn.utils.clip_grad_norm_(plain.parameters(), 8.0))
    )
    if not abs(norm - expected) <= 2e-3 * expected:
        return f"of float16 gradients clip_grad_norm_() returns {norm:.6g}, and their norm is {expected:.6g}"
    return gradients_as_expected("the clipped gradient of", model, plain, tolerance=0.01)


def test_a_norm_whose_square_float16_lacks_is_a_number(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_none(world.run(clip_half_on_rank, implementation, device, deadline=HANG))


def refused(implementation: Implementation, module: nn.Module) -> str:
    """Return the type and text of the error that wrapping raises on this rank, or "nothing"."""
    try:
        wrap(implementation, module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def nothing_to_train(implementation: Implementation, device: str) -> list[str]:
    frozen = nn.Linear(4, 4).to(device).requires_grad_(False)
    return [refused(implementation, module) for module in (nn.Sequential(nn.ReLU()), frozen)]


@pytest.mark.should("a module with nothing to train is a ValueError")
def test_a_module_with_nothing_to_train_is_a_value_error(
    implementation: Implementation, world: World, device: str
) -> None:
    for without, frozen in world.run(nothing_to_train, implementation, device, deadline=HANG):
        for said, what in ((without, "no parameters"), (frozen, "frozen parameters alone")):
            assert said.startswith("ValueError"), f"a module with {what} must be a ValueError, and was {said}"
            if is_ours(implementation):
                assert said.endswith(" has no trainable parameters, so there is no gradient to average")


def shard_again(implementation: Implementation, device: str) -> list[str]:
    plain = nn.Sequential(nn.Linear(4, 4)).to(device)
    model: Any = wrap(implementation, plain)
    return [refused(implementation, model), refused(implementation, plain)]


@pytest.mark.should("a wrapper is not wrapped again: a ValueError")
def test_a_wrapper_is_not_wrapped_again(
    implementation: Implementation, world: World, device: str, record_property: Any
) -> None:
    for wrapper, module in world.run(shard_again, implementation, device, deadline=HANG):
        assert wrapper.startswith("ValueError"), f"to wrap the wrapper must be a ValueError, and was {wrapper}"
        if not module.startswith("ValueError"):
            record_property("note", f"a module that is sharded already may be wrapped again: {module}")
        if is_ours(implementation):
            says = r"ValueError: this \w+ is sharded over ranks already(, at '[\w.]+')?: give it an unsharded module"
            assert re.fullmatch(says, wrapper) and re.fullmatch(says, module)


def different_on_rank(implementation: Implementation, what: str, device: str) -> str:
    """Wrap modules that differ in one parameter of the last rank."""
    parameters = {"first": torch.ones(3), "matrix": torch.ones(6, 2), "end": torch.ones(4)}
    if dist.get_rank() == dist.get_world_size() - 1:
        parameters = DIFFERENT[what][1](parameters)
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value))
    return refused(implementation, module.to(device))


Parameters = dict[str, torch.Tensor]
DIFFERENT: dict[str, tuple[str, Callable[[Parameters], Parameters]]] = {
    "larger": ("matrix", lambda p: p | {"matrix": torch.ones(6, 3)}),
    "transposed": ("matrix", lambda p: p | {"matrix": torch.ones(2, 6)}),
    "reshaped": ("matrix", lambda p: p | {"matrix": torch.ones(4, 3)}),
    "flat": ("matrix", lambda p: p | {"matrix": torch.ones(12)}),
    "one_dimension_more": ("matrix", lambda p: p | {"matrix": torch.ones(6, 2, 1)}),
    "last": ("end", lambda p: p | {"end": torch.ones(1, 4)}),
    "name": ("matrix", lambda p: {"other" if name == "matrix" else name: value for name, value in p.items()}),
    "missing": ("end", lambda p: {name: value for name, value in p.items() if name != "end"}),
    "one_more": ("more", lambda p: p | {"more": torch.ones(1)}),
}
"""For each case: the parameter that differs on the last rank, and the change."""


@pytest.mark.should("modules that differ between ranks are a ValueError on each")
@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (name, _) in DIFFERENT.items()], ids=DIFFERENT)
def test_ranks_with_different_modules_all_get_a_value_error(
    implementation: Implementation, world: World, what: str, name: str, device: str, record_property: Any
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to differ from")
    for rank, said in enumerate(world.run(different_on_rank, implementation, what, device, deadline=HANG)):
        assert said.startswith("ValueError"), (
            f"rank {rank} must raise ValueError, as {name} differs ({what}); it was {said}"
        )
        if name not in said:
            assert not is_ours(implementation), said
            record_property("note", f"where the ranks' modules differ at {name} the error does not name it: {said}")
