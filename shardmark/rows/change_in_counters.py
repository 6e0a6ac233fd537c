"""Changes in a row's counters, which are exact: a larger number is worse, and so are other collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from shardmark.rows.baseline import BaselineRow, Collectives
from shardmark.rows.change import Change, ChangesOrReason, larger_is_worse
from shardmark.verdict.betting import FAIL, PASS

OF_LIBRARIES = ("operators", "kernels", "saved_bytes", "synchronizations")
"""Counters that depend on PyTorch's choices: compared only with the same PyTorch on the same processor and GPUs."""


def changes_in_counters(
    baseline: BaselineRow, counters: Mapping[str, Any], same_machine: bool, baseline_name: str
) -> ChangesOrReason:
    """The changes of each counter that both rows have."""
    changes = [
        larger_is_worse(counter.replace("_", " "), counters[counter], before, baseline_name)
        for counter, before in baseline.counters.items()
        if counters.get(counter) is not None and (same_machine or counter not in OF_LIBRARIES)
    ]
    if baseline.collectives is not None and counters.get("collectives") is not None:
        changes += _collectives(baseline.collectives, counters["collectives"], baseline_name)
    return changes or "not counted"


def _collectives(before: Collectives, now: Collectives, baseline_name: str) -> list[Change]:
    """Compare the number and the bytes of collectives; where both are equal, also their kinds and their order."""
    before, now = _runs(before), _runs(now)
    if now == before:
        return [Change(PASS, "")]
    counts = [sum(times for *_, times in runs) for runs in (now, before)]
    sizes = [sum(nbytes * times for *_, nbytes, times in runs) for runs in (now, before)]
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, before, strict=False)))
    first = f"the first that differs is {_shown(now[place:])}, {_shown(before[place:])} in {baseline_name}"
    changes = [
        larger_is_worse("collectives", counts[0], counts[1], baseline_name),
        larger_is_worse("bytes in collectives", sizes[0], sizes[1], baseline_name),
    ]
    if (counts[0], sizes[0]) == (counts[1], sizes[1]):
        return [Change(FAIL, f"other collectives, as many and as large: {first}")]
    return [replace(change, text=f"{change.text}, and {first}") for change in changes]


def _runs(collectives: Collectives) -> Collectives:
    """Merge neighbours that are alike."""
    runs: Collectives = []
    for *collective, times in collectives:
        if runs and runs[-1][:-1] == collective:
            runs[-1][-1] += times
        else:
            runs.append([*collective, times])
    return runs


def _shown(runs: Collectives) -> str:
    if not runs:
        return "none"
    operation, dtype, nbytes, times = runs[0]
    return f"{times} x {operation} of {nbytes:,} bytes of {dtype}"
