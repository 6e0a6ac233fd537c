"""Compare a run with its baseline, an earlier run, for a report: what got worse and what got better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmark.report.outcomes import first_line
from shardmark.rows.baseline import BaselineRow, Machine
from shardmark.rows.change import BETTER, KINDS, WORSE, RowComparison, changes_in, count_compared, number_of_rows
from shardmark.rows.columns import Entry
from shardmark.rows.comparison import compare
from shardmark.rows.reader import entries_of
from shardmark.verdict.betting import UNDECIDED

NAMED = 10
"""At most this many new or missing tests are named; the rest is counted."""

OPEN = UNDECIDED
"""Outcome of a change that is neither worse nor better."""


@dataclass
class Changes:
    """Differences between a run and its baseline, by test; and how many rows were compared."""

    name: str
    """The baseline's name, as messages show it."""
    rows: list[list[str]] = field(default_factory=list)
    """[outcome, test, "time", "memory", "counters" or "verdict", text]."""
    counts: list[str] = field(default_factory=list)
    """Lines that say, of time, memory and counters, how many rows were compared and why others were not."""

    def of(self, outcome: str) -> int:
        """The number of figures with that outcome."""
        return sum(row[0] == outcome for row in self.rows)


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
    result = Changes(name)
    for entry in new["unmeasured"]:
        test, row = entry["fullname"], entry["extra_info"]
        if test in measured:
            why = f"{row['verdict']}, measured in {name}"
            result.rows.append([WORSE, test, "verdict", f"{why}: {first_line(row['why'])}" if row["why"] else why])
    for outcome in (WORSE, OPEN, BETTER):
        for test, kinds in found.items():
            for kind, each in kinds.items():
                result.rows += [
                    [outcome, test, kind, change.text] for change in changes_in(each) if change.outcome == outcome
                ]
    result.counts = [
        f"{kind.capitalize()}: {count_compared([each[kind] for each in found.values()])}." for kind in KINDS
    ]
    if machines[0] != machines[1]:
        before, here = machines[0].beside(machines[1]), machines[1].beside(machines[0])
        result.counts.insert(0, f"Times are not compared: {name} is of {before}, this run of {here}.")
    then, now = ({entry["fullname"]: entry for entry in entries_of(run)} for run in (baseline, new))
    result.counts.append(_named("new", [test for test in now if test not in then]))
    result.counts.append(_named("gone", [test for test in then if test not in now]))
    return result


def _named(what: str, tests: Sequence[str]) -> str:
    """As in "2 rows new: test_a.py::test_x, test_b.py::test_y."."""
    names = [test.rpartition("/")[2] for test in tests[:NAMED]]
    names += [f"{len(tests) - NAMED} more"] * (len(tests) > NAMED)
    return f"{number_of_rows(len(tests)).capitalize()} {what}{': ' * bool(names)}{', '.join(names)}."
