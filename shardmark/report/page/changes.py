"""What got slower or larger since an older run, and what faster or smaller, with the intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmark.against import Change, Compared, Machine, OldRow, compared
from shardmark.comparison import number_of_rows
from shardmark.evidence import FAIL, UNDECIDED, Interval
from shardmark.report.columns import Entry
from shardmark.report.outcomes import first_line
from shardmark.report.page.figure import Cell, Figure, first
from shardmark.report.page.vega import INK, SERIES, Spec, room, stand_ins
from shardmark.report.runfile import LISTS
from shardmark.rows import Row

NAMED = 10
"""Tests that are new or gone and named; the others are counted."""

WORSE, OPEN, BETTER = "slower or larger", UNDECIDED, "faster or smaller"
"""What comes of a figure that is not as it was, in the order in which they are shown."""


@dataclass
class Changes:
    """Of two runs: what is not as it was, by test, and how many figures were compared."""

    name: str
    rows: list[list[str]] = field(default_factory=list)
    """[outcome, test, "time", "memory", "counters" or "verdict", in words]."""
    counts: list[str] = field(default_factory=list)
    """Of time, memory and counters: how many rows were compared, and why others were not."""
    figure: Figure | None = None

    def of(self, outcome: str) -> int:
        """How many figures came to that."""
        return sum(row[0] == outcome for row in self.rows)


def changes(old: Entry, new: Entry, name: str) -> Changes:
    """What has changed in the rows of both since the run of that name. Raises KeyError, TypeError or ValueError where
    a row of either is of another version."""
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
                result.rows += [[outcome, test, kind, change.text] for change in _list(each) if _is(change, outcome)]
    result.counts = [_count(kind, [each[kind] for each in found.values()]) for kind in ("time", "memory", "counters")]
    if machines[0] != machines[1]:
        result.counts.insert(0, f"Times are not compared: {name} is of {machines[0]}, this run of {machines[1]}.")
    before, now = ([entry["fullname"] for each in LISTS for entry in run[each]] for run in (old, new))
    result.counts.append(_named("new", [test for test in now if test not in before]))
    result.counts.append(_named("gone", [test for test in before if test not in now]))
    slower = {row[1] for row in result.rows if row[2] == "time" and row[0] != OPEN}
    result.figure = _figure({test: both for test, both in ratios.items() if test in slower}, name)
    return result


def _judged(row: Row) -> Interval | None:
    """The ratio to the peer, and the interval that its verdict was taken from."""
    time = row["time"]
    if time.get("peer") is None:
        return None
    low, high = time["judged_interval"] or (0.0, math.inf)
    return Interval(time["ratio"], low, high, time["judged_confidence"])


def _list(found: Compared) -> Sequence[Change]:
    return [] if isinstance(found, str) else found


def _is(change: Change, outcome: str) -> bool:
    if change.better:
        return outcome == BETTER
    return outcome == {FAIL: WORSE, UNDECIDED: OPEN}.get(change.verdict)


def _count(kind: str, found: Sequence[Compared]) -> str:
    reasons = Counter(each for each in found if isinstance(each, str))
    others = "".join(f", {count} {reason}" for reason, count in reasons.most_common())
    return f"{kind.capitalize()}: {len(found) - reasons.total()} rows compared{others}."


def _named(what: str, tests: Sequence[str]) -> str:
    """How many rows are, and of which tests, by the names that they have in their files."""
    names = [test.rpartition("/")[2] for test in tests[:NAMED]]
    names += [f"{len(tests) - NAMED} more"] * (len(tests) > NAMED)
    return f"{number_of_rows(len(tests)).capitalize()} {what}{': ' * bool(names)}{', '.join(names)}."


def _figure(ratios: dict[str, tuple[Interval, Interval]], name: str) -> Figure | None:
    """Then and now: the ratio to the peer of the same run, with its interval, of every test that changed."""
    if not ratios:
        return None
    notes = ["Each step's time over its peer's in the same run, as seconds depend on what else the machine does."]
    entries = [
        {"test": test.partition("::")[2] or test, "run": run, "ratio": each.center, "low": each.low, "high": each.high}
        for test, both in ratios.items()
        for run, each in zip((name, "this run"), both, strict=True)
    ]
    shown = list(first(entries, notes))
    tests = list(dict.fromkeys(str(each["test"]) for each in shown))
    rows: list[list[Cell]] = [[*map(str, (each["test"], each["run"])), *_numbers(each)] for each in entries]
    columns = ["test", "run", "ratio to peer", "interval from", "to"]
    return Figure(f"Ratio to the peer, in {name} and now", _spec(shown, name, tests), columns, rows, notes, tests)


def _numbers(each: Entry) -> list[float]:
    return [float(f"{each[key]:.4g}") for key in ("ratio", "low", "high")]


def _spec(data: list[Entry], name: str, tests: Sequence[str]) -> Spec:
    shorts = stand_ins(tests)
    data = [each | {"test": shorts[each["test"]]} for each in data]
    encoding = {
        "y": {"field": "test", "type": "nominal", "sort": None, "axis": {"title": None, "minExtent": room(tests)}},
        "yOffset": {"field": "run", "sort": [name, "this run"]},
        "color": {
            "field": "run",
            "type": "nominal",
            "scale": {"domain": [name, "this run"], "range": [INK, SERIES[0]]},
            "legend": {"title": None},
        },
    }
    x = {"type": "quantitative", "scale": {"zero": False}}
    return {
        "data": {"values": data},
        "width": 420,
        "height": {"step": 14, "for": "offset"},
        "encoding": encoding,
        "layer": [
            {"mark": {"type": "rule"}, "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {"x": {**x, "field": "ratio", "axis": {"title": "ratio to peer"}}},
            },
        ],
    }
