"""Compare rows with their baseline: find figures that got slower or larger, and faster or smaller.

Bytes and counters carry no noise: any more is worse. Times are compared as ratios to the peer of the same run, because
seconds depend on whatever else the machine does; and on one machine only, because the ratio differs between machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import ACCEPTED, BETTER, KINDS, WORSE, RowComparison, changes_in, count_compared
from shardmark.rows.change_in_counters import changes_in_counters
from shardmark.rows.change_in_memory import changes_in_memory
from shardmark.rows.change_in_time import changes_in_time
from shardmark.rows.row import Row
from shardmark.rows.wanted import with_accepted
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
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


@dataclass(frozen=True)
class Compared:
    """A run's comparison, for its report: what it was compared with, each row by its test, and lines to add."""

    name: str
    rows: dict[str, RowComparison]
    notes: tuple[str, ...] = ()


class Comparison:
    """The comparisons of a run's rows, and the last lines that report them."""

    def __init__(self, accepted: Accepted | None = None) -> None:
        self.rows: dict[str, RowComparison] = {}
        """By the full names of their tests."""
        self._accepted = accepted or Accepted()

    def add(self, test_id: str, row: RowComparison) -> list[tuple[str, str]]:
        """Add a row's comparison, in which wanted changes pass; returns the verdict and the text of each change."""
        row = self.rows[test_id] = with_accepted(test_id, row, self._accepted)
        return [(change.verdict, change.text) for kind in row.values() for change in changes_in(kind)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterable[str] = ()) -> None:
        """Print how many rows were compared and why some were not, `others`, and what is worse, accepted and better."""
        for kind in KINDS:
            terminal.write_line(printable(f"{kind}: {count_compared([row[kind] for row in self.rows.values()])}"))
        for line in others:
            terminal.write_line(line)
        styles = {WORSE: "red", **({ACCEPTED: "yellow"} if self._accepted.name else {}), BETTER: "green"}
        for outcome, style in styles.items():
            lines = [
                printable(f"  {test_id}: {change.text}")
                for test_id, row in self.rows.items()
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
        for remark in self._accepted.remarks():
            terminal.write_line(printable(remark), yellow=True)

    def compared(self, name: str, *notes: str) -> Compared:
        """For the report: the rows beside the version or file of that name, and the remarks on `--accept`."""
        return Compared(name, self.rows, (*notes, *self._accepted.remarks()))
