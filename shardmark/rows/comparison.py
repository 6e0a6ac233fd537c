"""Compare rows with their baseline: find figures that got slower or larger, and faster or smaller.

Bytes and counters carry no noise: any more is worse. Times are compared as ratios to the peer of the same run, because
seconds depend on whatever else the machine does; and on one machine only, because the ratio differs between machines.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import BETTER, KINDS, WORSE, Line, RowComparison, changes_in, count_compared
from shardmark.rows.change_in_counters import changes_in_counters
from shardmark.rows.change_in_memory import changes_in_memory
from shardmark.rows.change_in_time import changes_in_time
from shardmark.rows.row import Row
from shardmark.text import printable
from shardmark.verdict.betting import Interval

MOST = 10
"""Most lines of regressions, and of improvements, that are printed without -v; the others are counted."""


def compare(
    baseline: BaselineRow, row: Row, ratio: Interval | None, same_machine: bool, baseline_name: str
) -> RowComparison:
    """Compare a row's time, memory and counters with its baseline.

    `ratio` is the row's ratio to its peer, with the interval that verdicts are taken from; None without a peer.
    """
    if (baseline.device, baseline.world_size) != (row["device"], row["world_size"]):
        return dict.fromkeys(KINDS, "on another device or number of ranks")
    return {
        "time": changes_in_time(baseline, row, ratio, baseline_name) if same_machine else "on another machine",
        "memory": changes_in_memory(baseline, row["memory"], same_machine, baseline_name),
        "counters": changes_in_counters(baseline, row.get("counters", {}), same_machine, baseline_name),
    }


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


class Comparison:
    """The comparisons of a run's rows, and the last lines that report them."""

    def __init__(self) -> None:
        self._rows: dict[str, RowComparison] = {}

    def add(self, test_id: str, row: RowComparison) -> list[tuple[str, str]]:
        """Add a row's comparison; returns the verdict and the text of each of its changes."""
        self._rows[test_id] = row
        return [(change.verdict, Line.of(change)) for kind in row.values() for change in changes_in(kind)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterable[str] = ()) -> None:
        """Print how many rows were compared and why some were not, then `others`, what is worse and what is better."""
        for kind in KINDS:
            terminal.write_line(printable(f"{kind}: {count_compared([row[kind] for row in self._rows.values()])}"))
        for line in others:
            terminal.write_line(line)
        for outcome, style in ((WORSE, "red"), (BETTER, "green")):
            lines = [
                "\n".join(printable(line) for line in (f"  {test_id}: {change.text}", *_indented(change.grown)))
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
