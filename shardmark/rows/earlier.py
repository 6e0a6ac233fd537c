"""One earlier run of `--against`: its file, its machine, and the comparison with this run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.atomic_json import Entry
from shardmark.rows.baseline import Baseline, BaselineRow, Machine
from shardmark.rows.change import Change, changes_in, number_of_rows
from shardmark.rows.comparison import Compared, Comparison, compare
from shardmark.rows.row import Row
from shardmark.rows.writer import RowFile
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.slowdown import UNSTEADY, Paired

NAMED = 3
"""At most this many rows that are not guarded in time are named at the start."""


class EarlierRun:
    """An earlier run and what it allows. Raises RunFileError, in one line, if the file cannot be used."""

    def __init__(self, path: Path, rows: RowFile, largest: float, accepted: Accepted | None) -> None:
        self.name = printable(path.name)
        self.baseline = Baseline(path)
        self.comparison = Comparison(largest, accepted)
        self._largest = largest
        self._rows = rows

    @cached_property
    def other_machine(self) -> str | None:
        """One line that says why times are not compared; None on the run's own machine."""
        then, here = self.baseline.machine, Machine.of(self._rows.machine_info)
        if then == here:
            return None
        return printable(f"time is not compared: {self.name} is of {then.beside(here)}; this is {here.beside(then)}")

    def row(self, test_id: str) -> BaselineRow | None:
        """The test's row in that run, if it has one."""
        return self.baseline.rows.get(test_id)

    def pairs(self, test_id: str, peer: str | None) -> Mapping[str, Paired]:
        """The row's paired steps, as far as times of this run may be compared with them."""
        old = self.row(test_id) if self.other_machine is None else None
        if old is None:
            return {}
        return {name: each for name, each in old.pairs.items() if name != "peer" or old.peer == peer}

    def judge(self, test_id: str, row: Row, later: Sequence[EarlierRun]) -> list[tuple[str, str]]:
        """Compare a row with its earlier one: (verdict, text) of each figure. A worse figure tells how it grew over the
        `later` runs."""
        old = self.row(test_id)
        if old is None:
            return []
        found = compare(old, row, self.other_machine is None, self.name, self._largest)
        return self.comparison.add(test_id, found, lambda change: self._by_run(test_id, old, change, later))

    def _by_run(self, test_id: str, old: BaselineRow, change: Change, later: Sequence[EarlierRun]) -> str:
        """The figure in each later run and now; empty without later runs, and for a change without figures."""
        series: list[str] = []
        if change.now is None:
            return ""
        for run in later:
            entries: dict[str, Any] = run.baseline.entries["benchmarks"]
            if test_id in entries:
                then = compare(old, entries[test_id]["extra_info"], run.other_machine is None, self.name, self._largest)
                figures = [each for kind in then.values() for each in changes_in(kind) if each.figure == change.figure]
                series += [f"{each.now:,.4g}" for each in figures[:1] if each.now is not None]
        return f"; by run: {', '.join([*series, f'now {change.now:,.4g}'])}" if series else ""

    def header(self, terminal: Any) -> Iterator[str]:
        """The lines at the start: how many rows, and those that are not guarded in time."""
        if self.other_machine is not None:
            yield terminal.markup(self.other_machine, red=True, bold=True)
            return
        rows = self.baseline.rows
        bare = [printable(test_id.rpartition("/")[2]) for test_id, row in rows.items() if not row.pairs]
        guarded = f"; not guarded in time: {len(bare)}, {', '.join(bare[:NAMED])}" if bare else ""
        yield f"against: {self.name}, {number_of_rows(len(rows))} of this machine{guarded}"
        own = [row for row in rows.values() if row.pairs and not all(each.processes for each in row.pairs.values())]
        if own:
            what = f"{number_of_rows(len(own))} of {self.name} of no fresh processes (--update-baseline has them)"
            yield f"against: {what}: slowdowns fail from {UNSTEADY:.0%} on"

    def write(self, terminal: pytest.TerminalReporter, collected: set[str], brief: bool) -> None:
        """Print the comparison; a brief one is a line where nothing is worse."""
        if brief and self.comparison.rows and not self.comparison.worse and self.other_machine is None:
            terminal.write_line(f"against {self.name}: slower or larger: 0")
            return
        terminal.section(f"against {self.name}", sep="-")
        if self.other_machine is not None:
            terminal.write_line(self.other_machine, red=True, bold=True)
        self.comparison.write(terminal, self._other_rows(collected))

    def compared(self, collected: set[str]) -> Compared:
        """The comparison, for the report."""
        machine = () if self.other_machine is None else (self.other_machine,)
        return self.comparison.compared(self.name, *machine, *self._other_rows(collected))

    def _other_rows(self, collected: set[str]) -> Iterator[str]:
        """A line that counts the rows that only this run or only the earlier one has."""
        measured = {entry["fullname"] for entry in self._rows.rows if entry["stats"] is not None}
        missing = self.baseline.rows.keys() - measured
        others = {
            "new": len(measured - self.baseline.rows.keys()),
            f"of {self.name} not measured this time": len(missing & collected),
            f"of {self.name} not among this run's tests": len(missing - collected),
        }
        if any(others.values()):
            yield "other rows: " + ", ".join(f"{count} {which}" for which, count in others.items() if count)

    @property
    def output(self) -> Entry:
        """The file."""
        return self.baseline.output
