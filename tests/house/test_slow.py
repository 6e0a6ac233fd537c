"""Large cases are left to implementations that make few calls, whatever else the machine does; the verdict says so."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from correctness.support.contracts import MANY_CALLS, calls_of, skip_if_slow
from shardmark.api.refusals import ledger
from shardmark.api.registry import Implementation, resolve


@pytest.fixture
def theirs() -> Implementation:
    return replace(resolve("attention", "eager"), spec="mine.py:attention")


def makes(calls: int) -> Callable[[], None]:
    """A function that makes that many calls, in C."""

    def eighth() -> None:
        for _ in range(calls):
            abs(1)

    return eighth


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_few_calls_is_judged(device: str, theirs: Implementation) -> None:
    with ledger() as notes:
        skip_if_slow(theirs, makes(MANY_CALLS - 10), device)
    assert not notes.unasked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_many_calls_is_skipped_and_the_verdict_says_so(device: str, theirs: Implementation) -> None:
    with ledger() as notes, pytest.raises(pytest.skip.Exception, match="too slow for a large case"):
        skip_if_slow(theirs, makes(MANY_CALLS + 1), device)
    assert notes.unasked == ["too slow for a large case: an eighth of it makes more than 100,000 calls"]


def test_what_is_compiled_first_does_not_count(theirs: Implementation) -> None:
    runs = iter([makes(2 * MANY_CALLS), makes(0)])
    skip_if_slow(theirs, lambda: next(runs)(), "cpu")


def test_ours_is_always_judged_on_a_gpu() -> None:
    skip_if_slow(resolve("attention", "eager"), makes(MANY_CALLS + 1), "cuda")
    with pytest.raises(pytest.skip.Exception):
        skip_if_slow(resolve("attention", "eager"), makes(MANY_CALLS + 1), "cpu")


def test_calls_are_counted_and_not_timed() -> None:
    assert calls_of(makes(100)) == calls_of(makes(100)) == calls_of(makes(0)) + 100
