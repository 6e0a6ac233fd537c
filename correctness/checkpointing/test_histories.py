"""Random models and passes: outputs and gradients equal those without the policy, to the bit.

Hypothesis draws blocks, their arguments, hooks, modes, autocast and how gradients are computed.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.checkpointing.events import HISTORIES, History
from correctness.checkpointing.models import Dropping, assert_same_bits, dropping, gradients, loss_of, raising
from correctness.checkpointing.player import Refused, results
from correctness.engine.histories import Problem, hold
from correctness.support.contracts import is_ours
from shardmark.api import Implementation

pytestmark = pytest.mark.family("checkpointing")


def _problem(implementation: Implementation, history: History, device: str) -> Problem | None:
    """Return the first result that the policy changes, or None.

    Raises Refused if the implementation cannot run such blocks.
    """
    expected = results(lambda model: model, history, device)
    try:
        found = results(implementation.watched, history, device)
    except Refused:
        raise
    except Exception as error:
        what = f"{type(error).__name__} with the policy, and none without: {error}"
        return Problem(len(history.events), what)
    for (number, name, mine), (_, same_name, theirs) in zip(found, expected, strict=False):
        if name != same_name:
            return Problem(number, f"{name} is given, and without the policy {same_name}")
        # Gradients of shared parameters, and of an input that is also an argument, are sums, which a policy may make in
        # another order, or in autocast's dtype.
        once = history.blocks == "different" and not any(place == "the input" for *_, place in history.extra)
        equal = _equal if once or is_ours(implementation) else _near
        same = mine is theirs if mine is None or theirs is None else equal(mine, theirs)
        if not same:
            return Problem(number, f"{name} is {_shown(mine)}, and without the policy {_shown(theirs)}")
    if len(found) != len(expected):
        return Problem(len(history.events), f"{len(found)} results, and without the policy {len(expected)}")
    return None


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())


def _near(mine: Tensor, theirs: Tensor) -> bool:
    if not theirs.numel():
        return _equal(mine, theirs)
    off, largest = (mine - theirs).double().nan_to_num().abs().max(), theirs.double().nan_to_num().abs().max()
    return mine.dtype == theirs.dtype and bool(off <= 4 * torch.finfo(torch.bfloat16).eps * largest)


def _shown(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.flatten()[:3].tolist()}... in {x.dtype}"


@pytest.mark.examples(20, 100, 600)
def test_any_history_is_to_the_bit_as_without(
    implementation: Implementation, examples: int, device: str, record_property: Any
) -> None:
    def problem(history: History) -> Problem | None:
        try:
            return _problem(implementation, history, device)
        except Refused as refused:
            record_property("note", str(refused))
            return None

    hold(HISTORIES, problem, examples)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_pass_after_one_that_raised_is_as_without(implementation: Implementation, where: str, device: str) -> None:
    """As of a batch that is left out: dropout then draws what it draws without the policy."""
    x = torch.randn(6, 8, device=device)

    def after_an_error(model: Dropping) -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        if where == "backward":
            loss = loss_of(model, x)
        with raising(model.blocks[1]), suppress(FloatingPointError):  # backward raises where it recomputes
            loss.backward() if where == "backward" else model(x)
        model.zero_grad()
        return gradients(model, x)

    assert_same_bits(after_an_error(implementation.watched(dropping(device))), after_an_error(dropping(device)))


class Cube(torch.autograd.Function):
    """x³ / 3, whose backward reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * x * again


class Cubing(Dropping):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[1].forward = Cube.apply


def test_a_backward_that_reads_a_saved_tensor_twice_is_right_or_an_error(
    implementation: Implementation, device: str, record_property: Any
) -> None:
    torch.manual_seed(0)
    plain, x = Cubing().to(device), torch.randn(6, 8, device=device)
    model = implementation.watched(copy.deepcopy(plain))
    expected = gradients(plain, x)
    try:
        found = gradients(model, x)
    except Exception as error:
        record_property("note", f"no saved tensor may be read twice: {type(error).__name__}")
        return
    assert_same_bits(found, expected)
