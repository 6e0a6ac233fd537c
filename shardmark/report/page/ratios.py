"""Then and now: the ratio to the peer of the same run, with its interval, of every test whose time has changed."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from shardmark.report.changes import Changes
from shardmark.report.page.figure import Cell, Figure, first
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.rows.columns import Entry


def ratios(changes: Changes) -> Figure | None:
    """The figure; None where no time has changed."""
    if not changes.ratios:
        return None
    notes = ["Each step's time over its peer's in the same run, as seconds depend on what else the machine does."]
    entries = [
        {"test": test.partition("::")[2] or test, "run": run, "ratio": each.center, "low": each.low, "high": each.high}
        for test, both in changes.ratios.items()
        for run, each in zip((changes.name, "this run"), both, strict=True)
    ]
    shown = list(first(entries, notes))
    tests = list(dict.fromkeys(str(each["test"]) for each in shown))
    rows: list[list[Cell]] = [[*map(str, (each["test"], each["run"])), *_numbers(each)] for each in entries]
    columns = ["test", "run", "ratio to peer", "interval from", "to"]
    return Figure(
        f"Ratio to the peer, in {changes.name} and now", _spec(shown, changes.name, tests), columns, rows, notes, tests
    )


def _numbers(each: Entry) -> list[float]:
    return [float(f"{each[key]:.4g}") for key in ("ratio", "low", "high")]


def _spec(data: list[Entry], name: str, tests: Sequence[str]) -> Chart:
    shorts = stand_ins(tests)
    runs = [name, "this run"]
    base = chart([each | {"test": shorts[each["test"]]} for each in data]).encode(
        names_axis("test", list(shorts.values()), room(tests)),
        alt.YOffset("run:N", sort=runs),
        color("run", runs, [INK, SERIES[0]]),
    )
    scale = alt.Scale(zero=False)
    intervals = base.mark_rule().encode(alt.X("low:Q", scale=scale), alt.X2("high"))
    points = base.mark_point(filled=True, size=50).encode(
        alt.X("ratio:Q", scale=scale, axis=alt.Axis(title="ratio to peer"))
    )
    return alt.layer(intervals, points).properties(width=420, height=alt.Step(14, **{"for": "offset"}))
