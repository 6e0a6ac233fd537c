"""Changes in a row's counters, which are exact: a larger number is worse, and so are other collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from shardmark.rows.baseline import BaselineRow, Collectives
from shardmark.rows.change import OTHER_MACHINE, Change, ChangesOrReason, larger_is_worse, not_compared
from shardmark.verdict.betting import FAIL, PASS

OF_LIBRARIES = ("operators", "kernels", "saved_bytes", "synchronizations", "bytecodes")
"""Counters that depend on PyTorch's choices or on Python's version: compared only with the same PyTorch and Python on
the same processor and GPUs."""
NOISY = ("library_bytecodes", "instructions")
"""Counters that are shown and not compared. In 80 small rows, run twice in fresh processes, no step differed in the
bytecodes of the user's functions, and four in those of libraries, by up to 2.6%: DTensor's caches compare keys anew."""
PARTS = {"operators": "operators_by_name", "bytecodes": "bytecodes_by_function"}
"""Counters that are sums of others, which say what grew."""
SHOWN = 12
"""Most lines on what grew in one figure; the rest is one more line."""


def changes_in_counters(
    baseline: BaselineRow, counters: Mapping[str, Any], same_machine: bool, baseline_name: str
) -> ChangesOrReason:
    """The changes of each counter that both rows have."""
    changes = []
    for counter, before in baseline.counters.items():
        name, now = counter.replace("_", " "), counters.get(counter)
        if now is None or counter in NOISY:
            continue
        if counter in OF_LIBRARIES and not same_machine:
            changes.append(not_compared(name, OTHER_MACHINE))
            continue
        change = larger_is_worse(name, now, before, baseline_name)
        parts = PARTS.get(counter, "")
        grown = grown_lines(counters.get(parts) or {}, baseline.parts.get(parts, {}))
        changes.append(replace(change, grown=grown) if change.verdict == FAIL else change)
    compared = any(not change.left_out for change in changes)
    if baseline.collectives is not None and counters.get("collectives") is not None:
        changes += _collectives(baseline.collectives, counters["collectives"], baseline_name)
        compared = True
    return changes if compared else OTHER_MACHINE if changes else "not counted"


def grown_lines(now: Mapping[str, int], before: Mapping[str, int]) -> tuple[str, ...]:
    """The names whose number grew, the largest difference first: "3 more: aten::mul"."""
    more = {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
    names = sorted(more, key=lambda name: -more[name]) if before else []
    lines = [f"{more[name]:,} more: {name}" for name in names[:SHOWN]]
    rest = names[SHOWN:]
    return (*lines, *([f"{sum(more[name] for name in rest):,} more: {len(rest)} others"] if rest else []))


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
