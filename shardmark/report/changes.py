"""Changes between a run and its baseline, for a report: figures that got worse, and those that got better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardmark.report.outcomes import first_line
from shardmark.rows.baseline import BaselineRow, Machine
from shardmark.rows.change import (
    ACCEPTED,
    BETTER,
    KINDS,
    WORSE,
    Change,
    RowComparison,
    changes_in,
    count_compared,
    number_of_rows,
)
from shardmark.rows.change_in_time import not_excluded
from shardmark.rows.columns import Entry
from shardmark.rows.comparison import Compared, compare
from shardmark.rows.reader import entries_of
from shardmark.text import number_of
from shardmark.verdict.betting import FAIL, UNDECIDED
from shardmark.verdict.slowdown import LARGEST

NAMED = 10
"""At most this many new or missing tests are named; the rest is counted."""

OPEN = UNDECIDED
"""Outcome of a change that is neither worse nor better."""


@dataclass(frozen=True)
class Figure:
    """A figure of a test that has changed; `kind` is "time", "memory", "counters" or "verdict"."""

    test: str
    kind: str
    change: Change


@dataclass
class Changes:
    """Differences between a run and its baseline, by test; and how many rows were compared."""

    name: str
    """The baseline's name, as messages show it."""
    found: Mapping[str, RowComparison] = field(default_factory=dict)
    """The comparison of each row, by its test."""
    figures: list[Figure] = field(default_factory=list)
    """Those that are worse, accepted, undecided or better, in this order."""
    counts: list[str] = field(default_factory=list)
    """Lines that say, of time, memory and counters, how many rows were compared and why others were not."""

    @property
    def rows(self) -> list[list[str]]:
        """[outcome, test, "time", "memory", "counters" or "verdict", text] of each figure."""
        return [[each.change.outcome, each.test, each.kind, each.change.text] for each in self.figures]

    def of(self, outcome: str) -> int:
        """The number of figures with that outcome."""
        return sum(each.change.outcome == outcome for each in self.figures)

    def sentence(self) -> str:
        """The verdict: whether anything is worse, how much was compared, and what is left open."""
        compared = list(self._compared())
        if worse := self.of(WORSE):
            text = f"Slower or larger than {self.name}: {number_of(worse, 'figure')}"
        elif compared:
            text = f"Nothing slower or larger than {self.name}"
        else:
            return f"Nothing was compared with {self.name}."
        parts = [", ".join(compared)] if compared else []
        parts += [f"{number_of(count, 'figure')} {each}" for each in (ACCEPTED, OPEN) if (count := self.of(each))]
        parts += [self._not_excluded()] if self._not_excluded() else []
        return f"{text}{'; ' if worse and parts else ': ' if parts else ''}{'; '.join(parts)}."

    def _compared(self) -> Iterator[str]:
        """As in "12 rows compared in time and memory", "none in counters"; nothing where no row was compared."""
        kinds_of: dict[int, list[str]] = {}
        for kind in KINDS:
            count = sum(not isinstance(row[kind], str) for row in self.found.values())
            kinds_of.setdefault(count, []).append(kind)
        none = kinds_of.pop(0, [])
        for place, (count, kinds) in enumerate(sorted(kinds_of.items(), reverse=True)):
            *others, last = kinds
            names = f"{', '.join(others)} and {last}" if others else last
            yield f"{count} in {names}" if place else f"{number_of_rows(count)} compared in {names}"
        if kinds_of and none:
            yield f"none in {' or '.join(none)}"

    def _not_excluded(self) -> str:
        """The largest slowdown that rows whose time is not worse leave possible; empty where none matters."""
        by_row = [bound for row in self.found.values() if (bound := not_excluded(changes_in(row["time"]))) is not None]
        open_rows = [bound for bound in by_row if bound > LARGEST]
        if not open_rows:
            return ""
        most = max(open_rows)
        size = "of any size" if math.isinf(most) else f"up to {100 * most:.2g}%" if most < 0.1 else f"up to {most:.0%}"
        return f"slowdowns {size} are not excluded in {number_of_rows(len(open_rows))}"


def changes(baseline: Entry, new: Entry, name: str) -> Changes:
    """Compare the rows of the run `new` with those of its baseline, a run that messages call `name`.

    Raises KeyError, TypeError or ValueError where another version wrote a row.
    """
    measured = {entry["fullname"]: entry["extra_info"] for entry in baseline["benchmarks"]}
    machines = [Machine.of(run["machine_info"]) for run in (baseline, new)]
    found: dict[str, RowComparison] = {}
    for entry in new["benchmarks"]:
        test, row = entry["fullname"], entry["extra_info"]
        if test in measured:
            found[test] = compare(BaselineRow.of(measured[test]), row, machines[0] == machines[1], name)
    lost = []
    for entry in new["unmeasured"]:
        test, row = entry["fullname"], entry["extra_info"]
        if test in measured:
            why = f"{row['verdict']}, measured in {name}"
            text = f"{why}: {first_line(row['why'])}" if row["why"] else why
            lost.append(Figure(test, "verdict", Change(FAIL, text)))
    result = changes_of(Compared(name, found), lost)
    if machines[0] != machines[1]:
        before, here = machines[0].beside(machines[1]), machines[1].beside(machines[0])
        result.counts.insert(0, f"Times are not compared: {name} is of {before}, this run of {here}.")
    then, now = ({entry["fullname"]: entry for entry in entries_of(run)} for run in (baseline, new))
    result.counts.append(_named("new", [test for test in now if test not in then]))
    result.counts.append(_named("gone", [test for test in then if test not in now]))
    return result


def changes_of(compared: Compared, lost: Sequence[Figure] = ()) -> Changes:
    """The changes that a run has found; `lost` are figures that it could not measure."""
    figures = [
        Figure(test, kind, change)
        for test, kinds in compared.rows.items()
        for kind, each in kinds.items()
        for change in changes_in(each)
    ]
    outcomes = (WORSE, ACCEPTED, OPEN, BETTER)
    shown = [each for each in [*lost, *figures] if each.change.outcome in outcomes]
    shown.sort(key=lambda each: outcomes.index(each.change.outcome))
    rows = compared.rows.values()
    counts = [f"{kind.capitalize()}: {count_compared([each[kind] for each in rows])}." for kind in KINDS]
    return Changes(compared.name, compared.rows, shown, [*counts, *compared.notes])


def _named(what: str, tests: Sequence[str]) -> str:
    """As in "2 rows new: test_a.py::test_x, test_b.py::test_y."."""
    names = [test.rpartition("/")[2] for test in tests[:NAMED]]
    names += [f"{len(tests) - NAMED} more"] * (len(tests) > NAMED)
    return f"{number_of_rows(len(tests)).capitalize()} {what}{': ' * bool(names)}{', '.join(names)}."
