"""Compare rows with their baseline: find figures that got slower or larger, and faster or smaller.

Bytes and counters carry no noise: any more is worse. Times are compared as ratios to the peer of the same run, because
seconds depend on whatever else the machine does; and on one machine only, because the ratio differs between machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import pytest

from shardmark.rows.baseline import BaselineRow, Collectives
from shardmark.rows.row import Row
from shardmark.text import printable
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval
from shardmark.verdict.budget import tolerated

KINDS = ("time", "memory", "counters")
WORSE, BETTER = "slower or larger", "faster or smaller"

WORKSPACE_SLACK = 1.05
"""Workspace may grow by this factor: a library chooses among its kernels anew in each run."""

OF_LIBRARIES = ("operators", "kernels", "saved_bytes", "synchronizations")
"""Counters that depend on PyTorch's choices: compared only with the same PyTorch on the same processor and GPUs."""

MOST = 10
"""Most lines of regressions, and of improvements, that are printed without -v; the others are counted."""


@dataclass(frozen=True)
class Change:
    """One figure beside its baseline; the verdict is FAIL where it is worse."""

    verdict: str
    text: str
    better: bool = False

    @property
    def outcome(self) -> str:
        """WORSE, BETTER, UNDECIDED, or PASS for a figure that is none of these."""
        return BETTER if self.better else {FAIL: WORSE}.get(self.verdict, self.verdict)


ChangesOrReason = list[Change] | str
"""Changes of a row's time, memory or counters; or why these were not compared."""

RowComparison = dict[str, ChangesOrReason]
"""Changes of one row, by kind: "time", "memory" and "counters"."""


def compare(
    baseline: BaselineRow, row: Row, ratio: Interval | None, same_machine: bool, baseline_name: str
) -> RowComparison:
    """Compare a row's time, memory and counters with its baseline.

    `ratio` is the row's ratio to its peer, with the interval that verdicts are taken from; None without a peer.
    """
    if (baseline.device, baseline.world_size) != (row["device"], row["world_size"]):
        return dict.fromkeys(KINDS, "on another device or number of ranks")
    return {
        "time": _time(baseline, row, ratio, baseline_name) if same_machine else "on another machine",
        "memory": _memory(baseline, row["memory"], same_machine, baseline_name),
        "counters": _counters(baseline, row.get("counters", {}), same_machine, baseline_name),
    }


class Comparison:
    """The comparisons of a run's rows, and the last lines that report them."""

    def __init__(self) -> None:
        self._rows: dict[str, RowComparison] = {}

    def add(self, test_id: str, row: RowComparison) -> list[tuple[str, str]]:
        """Add a row's comparison; returns the verdict and the text of each of its changes."""
        self._rows[test_id] = row
        return [(change.verdict, change.text) for kind in row.values() for change in changes_in(kind)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterable[str] = ()) -> None:
        """Print how many rows were compared and why some were not, then `others`, what is worse and what is better."""
        for kind in KINDS:
            terminal.write_line(printable(f"{kind}: {count_compared([row[kind] for row in self._rows.values()])}"))
        for line in others:
            terminal.write_line(line)
        for outcome, style in ((WORSE, "red"), (BETTER, "green")):
            lines = [
                printable(f"  {test_id}: {change.text}")
                for test_id, row in self._rows.items()
                for kind in row.values()
                for change in changes_in(kind)
                if change.outcome == outcome
            ]
            terminal.write_line(f"{outcome}: {len(lines)}", **{style: bool(lines)})
            shown = lines if terminal.config.option.verbose > 0 else lines[:MOST]
            for line in shown:
                terminal.write_line(line)
            if len(lines) > len(shown):
                terminal.write_line(f"  and {len(lines) - len(shown)} more")


def changes_in(found: ChangesOrReason) -> Sequence[Change]:
    """The changes; none where nothing was compared."""
    return () if isinstance(found, str) else found


def count_compared(found: Sequence[ChangesOrReason]) -> str:
    """Say how many rows were compared, how many of those are undecided, and why the others were not compared."""
    reasons = Counter(each for each in found if isinstance(each, str))
    undecided = sum(change.verdict == UNDECIDED for each in found for change in changes_in(each))
    text = f"{number_of_rows(len(found) - reasons.total())} compared"
    text += f", {undecided} undecided" if undecided else ""
    return text + "".join(f", {count} {reason}" for reason, count in reasons.most_common())


def number_of_rows(count: int) -> str:
    """As in "1 row" and "2 rows"."""
    return f"{count} row{'s' * (count != 1)}"


def _time(baseline: BaselineRow, row: Row, ratio: Interval | None, baseline_name: str) -> ChangesOrReason:
    before = baseline.ratio
    if ratio is None or before is None:
        return "without a peer"
    if baseline.peer != row["time"]["peer"]:
        return "with another peer"
    if baseline.link != row["link"]:
        return "on another link"
    if before.ends is None:
        return f"of too few rounds in {baseline_name}"
    text = (
        f"{ratio.center:.3f}x {baseline.peer}'s time, {ratio}, against {before.center:.3f}x in {baseline_name}, "
        f"[{before.low:.4g}, {before.high:.4g}]"
    )
    return [Change(ratio.verdict(tolerated(before.high)), text, better=tolerated(ratio.high) < before.low)]


def _memory(
    baseline: BaselineRow, memory: Mapping[str, Any], same_machine: bool, baseline_name: str
) -> ChangesOrReason:
    parts = {"tensors": 1.0, "workspace": WORKSPACE_SLACK} if same_machine else {"tensors": 1.0}
    changes = [
        _larger_is_worse(f"bytes of {part} at the peak", memory[part], baseline.memory[part], baseline_name, slack)
        for part, slack in parts.items()
        if part in memory and part in baseline.memory
    ]
    return changes or "not metered"


def _counters(
    baseline: BaselineRow, counters: Mapping[str, Any], same_machine: bool, baseline_name: str
) -> ChangesOrReason:
    changes = [
        _larger_is_worse(counter.replace("_", " "), counters[counter], before, baseline_name)
        for counter, before in baseline.counters.items()
        if counters.get(counter) is not None and (same_machine or counter not in OF_LIBRARIES)
    ]
    if baseline.collectives is not None and counters.get("collectives") is not None:
        changes += _collectives(baseline.collectives, counters["collectives"], baseline_name)
    return changes or "not counted"


def _larger_is_worse(what: str, now: float, before: float, baseline_name: str, slack: float = 1.0) -> Change:
    text = f"{now:,} {what}, {before:,} in {baseline_name}"
    return Change(FAIL if now > before * slack else PASS, text, better=now * slack < before)


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
        _larger_is_worse("collectives", counts[0], counts[1], baseline_name),
        _larger_is_worse("bytes in collectives", sizes[0], sizes[1], baseline_name),
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
