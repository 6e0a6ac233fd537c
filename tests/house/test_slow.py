"""Which implementations are too slow for a large case: none whose first run compiles, and on a GPU none of ours."""

from argparse import Namespace
from dataclasses import replace
from unittest.mock import Mock

import pytest

from correctness.support import contracts
from correctness.support.contracts import SLOW, skip_if_slow
from shardmark.api.registry import Implementation, resolve


@pytest.fixture
def theirs() -> Implementation:
    return replace(resolve("attention", "eager"), spec="mine.py:attention")


def take(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Mock:
    """Let runs take these times, one after the other; return the mock that makes their stopwatches."""
    stops = iter([Namespace(seconds=each) for each in seconds])
    watch = Mock(side_effect=lambda device: Namespace(start=lambda: None, stop=lambda: next(stops)))
    monkeypatch.setattr(contracts, "Stopwatch", watch)
    return watch


def is_judged(implementation: Implementation, device: str, eighth: Mock | None = None) -> bool:
    try:
        skip_if_slow(implementation, eighth or Mock(), device)
    except pytest.skip.Exception:
        return False
    return True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("seconds", "runs"), [([SLOW], 1), ([60.0, SLOW], 2)], ids=["fast", "compiles"])
def test_what_is_fast_when_it_is_warm_is_judged(
    seconds: list[float], runs: int, device: str, theirs: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, eighth = take(monkeypatch, *seconds), Mock()
    assert is_judged(theirs, device, eighth) and eighth.call_count == runs
    watch.assert_called_with(device)  # which waits for a GPU


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_stays_slow_is_skipped(device: str, theirs: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, 60.0, 60.0)
    assert not is_judged(theirs, device)


def test_on_a_gpu_ours_is_judged_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, 60.0, 60.0)
    assert is_judged(resolve("attention", "eager"), "cuda") and not is_judged(resolve("attention", "eager"), "cpu")
