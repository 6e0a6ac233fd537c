"""Large cases are left to implementations that make few calls and hold few bytes; the verdict says so."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from correctness.support import contracts
from correctness.support.contracts import MANY_CALLS, calls_of, skip_if_slow
from shardmark.api.refusals import ledger
from shardmark.api.registry import Implementation, resolve


@pytest.fixture
def theirs() -> Implementation:
    return replace(resolve("attention", "eager"), spec="mine.py:attention")


def makes(calls: int) -> Callable[[int], None]:
    """A part of a case that makes that many calls, in C."""

    def part(share: int) -> None:
        for _ in range(calls):
            abs(1)

    return part


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_few_calls_is_judged(device: str, theirs: Implementation) -> None:
    with ledger() as notes:
        skip_if_slow(theirs, makes(MANY_CALLS - 10), device)
    assert not notes.unasked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_many_calls_is_skipped_and_the_verdict_says_so(device: str, theirs: Implementation) -> None:
    with ledger() as notes, pytest.raises(pytest.skip.Exception, match="too slow for this size"):
        skip_if_slow(theirs, makes(MANY_CALLS + 1), device)
    assert notes.unasked == ["too slow for this size: 1/8 of it makes more than 100,000 calls"]


def test_what_is_compiled_first_does_not_count(theirs: Implementation) -> None:
    runs = chain([makes(2 * MANY_CALLS)], repeat(makes(0)))
    skip_if_slow(theirs, lambda share: next(runs)(share), "cpu")


@pytest.mark.parametrize(("power", "judged"), [(1, True), (2, False)])
def test_what_holds_more_than_there_may_be_is_skipped(power: int, judged: bool, theirs: Implementation) -> None:
    """64 KiB at an eighth; the whole is 512 KiB where bytes grow with the size, and 4 MiB with its square."""

    def part(share: int) -> Tensor:
        return torch.zeros(2**16 * 8**power // share**power, dtype=torch.uint8)

    skips = nullcontext() if judged else pytest.raises(pytest.skip.Exception, match="too much memory for this size")
    with ledger() as notes, patch.object(contracts, "MANY_BYTES", 2**21), skips:
        skip_if_slow(theirs, part, "cpu")
    assert bool(notes.unasked) != judged


def test_ours_is_always_judged_on_a_gpu() -> None:
    skip_if_slow(resolve("attention", "eager"), makes(MANY_CALLS + 1), "cuda")
    with pytest.raises(pytest.skip.Exception):
        skip_if_slow(resolve("attention", "eager"), makes(MANY_CALLS + 1), "cpu")


def test_calls_are_counted_and_not_timed() -> None:
    few, many = (calls_of(partial(makes(calls), 8)) for calls in (0, 100))
    assert calls_of(partial(makes(100), 8)) == many == few + 100
