"""Compare rows with their baseline: find figures that got slower or larger, and faster or smaller.

Bytes and counters carry no noise: any more is worse. Times are compared as ratios to the peer of the same run, because
seconds depend on whatever else the machine does; and on one machine only, because the ratio differs between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pytest

from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import (
    ACCEPTED,
    BETTER,
    KINDS,
    WORSE,
    Change,
    Line,
    RowComparison,
    changes_in,
    count_compared,
    number_of_rows,
)
from shardmark.rows.change_in_counters import changes_in_counters
from shardmark.rows.change_in_memory import changes_in_memory
from shardmark.rows.change_in_time import changes_in_time, not_excluded, share, shared_not_excluded
from shardmark.rows.row import Row
from shardmark.rows.wanted import with_accepted
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.betting import FAIL
from shardmark.verdict.slowdown import LARGEST

MOST = 10
"""Most lines of regressions, and of improvements, that are printed without -v; the others are counted."""


def compare(
    baseline: BaselineRow, row: Row, same_machine: bool, baseline_name: str, largest: float = LARGEST
) -> RowComparison:
    """Compare a row's time, memory and counters with its baseline; in time, a pass excludes what is over `largest`."""
    if (baseline.device, baseline.world_size) != (row["device"], row["world_size"]):
        return dict.fromkeys(KINDS, "on another device or number of ranks")
    return {
        "time": changes_in_time(baseline, row, baseline_name, largest) if same_machine else "on another machine",
        "memory": changes_in_memory(baseline, row["memory"], same_machine, baseline_name),
        "counters": changes_in_counters(baseline, row.get("counters", {}), same_machine, baseline_name),
    }


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@dataclass(frozen=True)
class Compared:
    """A run's comparison, for its report: what it was compared with, each row by its test, and lines to add."""

    name: str
    rows: dict[str, RowComparison]
    notes: tuple[str, ...] = ()


class Comparison:
    """The comparisons of a run's rows, and the last lines that report them."""

    def __init__(self, largest: float = LARGEST, accepted: Accepted | None = None) -> None:
        self.rows: dict[str, RowComparison] = {}
        """By the full names of their tests."""
        self._accepted = accepted or Accepted()
        self._largest = largest

    @property
    def worse(self) -> int:
        """The number of figures that got worse."""
        return sum(change.outcome == WORSE for row in self.rows.values() for change in _all_changes(row))

    def add(
        self, test_id: str, row: RowComparison, more: Callable[[Change], str] = lambda change: ""
    ) -> list[tuple[str, str]]:
        """Add a row's comparison, in which wanted changes pass; returns the verdict and the text of each change. `more`
        is told of a change for the worse, and returns what is to be added to its text."""
        row = with_accepted(test_id, row, self._accepted)
        self.rows[test_id] = row = {
            kind: each if isinstance(each, str) else [_told(change, more) for change in each]
            for kind, each in row.items()
        }
        return [(change.verdict, Line.of(change)) for kind in row.values() for change in changes_in(kind)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterable[str] = ()) -> None:
        """Print how many rows were compared and why some were not, `others`, and what is worse, accepted and better."""
        for kind in KINDS:
            terminal.write_line(printable(f"{kind}: {count_compared([row[kind] for row in self.rows.values()])}"))
        for line in others:
            terminal.write_line(line)
        if (slowdowns := self._not_excluded()) is not None:
            terminal.write_line(slowdowns)
        styles = {WORSE: "red", **({ACCEPTED: "yellow"} if self._accepted.name else {}), BETTER: "green"}
        for outcome, style in styles.items():
            lines = [
                "\n".join(printable(line) for line in (f"  {test_id}: {change.text}", *_indented(change.grown)))
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

    def _not_excluded(self) -> str | None:
        """A line on the slowdowns that were not excluded; None where no time was compared."""
        found = [bound for row in self.rows.values() if (bound := not_excluded(changes_in(row["time"]))) is not None]
        open_ = [bound for bound in found if bound > self._largest]
        if not found:
            return None
        text = f"slowdowns over {share(self._largest)} are excluded in {number_of_rows(len(found) - len(open_))}"
        text += f"; up to {share(max(open_))} are not in {len(open_)}" if open_ else ""
        changes = (changes_in(row["time"]) for row in self.rows.values())
        shared = [bound for each in changes if (bound := shared_not_excluded(each)) is not None]
        return f"{text}; shared with a peer, up to {share(max(shared))} are not" if shared else text


def _told(change: Change, more: Callable[[Change], str]) -> Change:
    return replace(change, text=change.text + more(change)) if change.verdict == FAIL else change


def _all_changes(row: RowComparison) -> Iterator[Change]:
    for kind in row.values():
        yield from changes_in(kind)
