"""Compare two runs: what got slower or larger, and what faster or smaller, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmark.report.outcomes import first_line
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of
from shardmark.rows.row import Row
from shardmark.rows.then_and_now.baseline import Change, Compared, Machine, OldRow, compared
from shardmark.rows.then_and_now.comparison import BETTER, WORSE, changes_in, counted, number_of_rows
from shardmark.verdict.betting import FAIL, UNDECIDED, Interval

NAMED = 10
"""At most so many new or missing tests are named; the others are counted."""

OPEN = UNDECIDED
"""Outcome of a change that is neither worse nor better."""


@dataclass
class Changes:
    """What differs between two runs, by test, and how many figures were compared."""

    name: str
    rows: list[list[str]] = field(default_factory=list)
    """[outcome, test, "time", "memory", "counters" or "verdict", in words]."""
    counts: list[str] = field(default_factory=list)
    """Lines that say, for time, memory and counters, how many rows were compared and why others were not."""
    ratios: dict[str, tuple[Interval, Interval]] = field(default_factory=dict)
    """For each test whose time has changed: the ratio to the peer then, and now."""

    def of(self, outcome: str) -> int:
        """The number of figures with that outcome."""
        return sum(row[0] == outcome for row in self.rows)


def changes(old: Entry, new: Entry, name: str) -> Changes:
    """Compare the rows that both runs have; `name` is the old run's, as messages show it.

    Raises KeyError, TypeError or ValueError where a row was written by another version.
    """
    measured = {entry["fullname"]: entry["extra_info"] for entry in old["benchmarks"]}
    machines = [Machine.of(run["machine_info"]) for run in (old, new)]
    found: dict[str, dict[str, Compared]] = {}
    ratios: dict[str, tuple[Interval, Interval]] = {}
    for entry in new["benchmarks"]:
        test, row = entry["fullname"], entry["extra_info"]
        if test in measured:
            ratio, older = _judged(row), measured[test]
            found[test] = compared(OldRow.of(older), row, ratio, machines[0] == machines[1], name)
            earlier = _judged(older)
            if ratio is not None and earlier is not None and ratio.ends and earlier.ends:
                ratios[test] = earlier, ratio
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
                    [outcome, test, kind, change.text] for change in changes_in(each) if _is(change, outcome)
                ]
    result.counts = [
        f"{kind.capitalize()}: {counted([each[kind] for each in found.values()])}."
        for kind in ("time", "memory", "counters")
    ]
    if machines[0] != machines[1]:
        result.counts.insert(0, f"Times are not compared: {name} is of {machines[0]}, this run of {machines[1]}.")
    before, now = ({entry["fullname"]: entry for entry in entries_of(run)} for run in (old, new))
    result.counts.append(_named("new", [test for test in now if test not in before]))
    result.counts.append(_named("gone", [test for test in before if test not in now]))
    slower = {row[1] for row in result.rows if row[2] == "time" and row[0] != OPEN}
    result.ratios = {test: both for test, both in ratios.items() if test in slower}
    return result


def _judged(row: Row) -> Interval | None:
    """The ratio to the peer with the interval that decided its verdict; None without a peer."""
    time = row["time"]
    if time.get("peer") is None or "predicted" in time:
        return None
    low, high = time["judged_interval"] or (0.0, math.inf)
    assert time["ratio"] is not None
    return Interval(time["ratio"], low, high, time["judged_confidence"])


def _is(change: Change, outcome: str) -> bool:
    if change.better:
        return outcome == BETTER
    return outcome == {FAIL: WORSE, UNDECIDED: OPEN}.get(change.verdict)


def _named(what: str, tests: Sequence[str]) -> str:
    """As in "2 rows new: test_a.py::test_x, test_b.py::test_y."."""
    names = [test.rpartition("/")[2] for test in tests[:NAMED]]
    names += [f"{len(tests) - NAMED} more"] * (len(tests) > NAMED)
    return f"{number_of_rows(len(tests)).capitalize()} {what}{': ' * bool(names)}{', '.join(names)}."
