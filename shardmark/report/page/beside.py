"""Two runs side by side: ratios to the peer then and now, and predicted times beside measured ones."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from shardmark.report.changes import Changes
from shardmark.report.page.figure import Cell, Figure, first, in_unit
from shardmark.report.page.predicted import predicted_interval
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of
from shardmark.rows.row import figure


def ratios(changes: Changes) -> Figure | None:
    """Each changed test's ratio to its peer, then and now; None if no time has changed."""
    if not changes.ratios:
        return None
    notes = ["Each step's time over its peer's in the same run: seconds alone depend on what else the machine does."]
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
        f"Ratio to the peer, in {changes.name} and now",
        _ratios_chart(shown, changes.name, tests),
        columns,
        rows,
        notes,
        tests,
    )


def _numbers(each: Entry) -> list[float]:
    return [float(f"{each[key]:.4g}") for key in ("ratio", "low", "high")]


def _ratios_chart(data: list[Entry], name: str, tests: Sequence[str]) -> Chart:
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


def is_predicted(run: Entry) -> bool:
    """Whether the run is a simulation."""
    return any(entry["extra_info"].get("simulated") for entry in entries_of(run))


def beside(predicted: Entry, measured: Entry) -> Figure | None:
    """Predicted times with intervals beside measured ones of the same tests; None if no test is in both runs."""
    means = {entry["fullname"]: entry["stats"]["median"] for entry in measured["benchmarks"]}
    found = [
        entry for entry in predicted["benchmarks"] if entry["fullname"] in means and figure(entry, "time.predicted")
    ]
    if not found:
        return None
    notes = ["Bars: the interval predicted to hold 9 of 10 steps. Error: of the predicted time."]
    names = [entry["fullname"].partition("::")[2] or entry["fullname"] for entry in found]
    rows: list[list[Cell]] = []
    for name, entry in zip(names, found, strict=True):
        mean, own = entry["stats"]["median"], means[entry["fullname"]]
        seconds = (in_unit(each, "s") for each in (mean, *(predicted_interval(entry) or (mean, mean)), own))
        rows.append([name, *seconds, f"{100 * (mean / own - 1):+.1f}%"])
    columns = ["test", "predicted ms", "from", "to", "measured ms", "error"]
    shown = list(first([dict(zip(columns, row, strict=True)) for row in rows], notes))
    return Figure("Predicted beside measured", _beside_chart(shown), columns, rows, notes, names)


def _beside_chart(shown: Sequence[Entry]) -> Chart:
    shorts = stand_ins([each["test"] for each in shown])
    kinds = ["predicted", "measured"]
    data = [
        {"test": shorts[each["test"]], "time": kind, "ms": each[f"{kind} ms"], "from": each["from"], "to": each["to"]}
        for each in shown
        for kind in kinds
    ]
    scale, axis = alt.Scale(type="log"), alt.Axis(title="ms")
    names = [each["test"] for each in shown]
    base = chart(data).encode(names_axis("test", [shorts[name] for name in names], room(names)))
    shape = alt.Scale(domain=kinds, range=["diamond", "circle"])
    intervals = base.mark_rule().encode(alt.X("from:Q", scale=scale, axis=axis), alt.X2("to"))
    points = base.mark_point(filled=True, size=60).encode(
        alt.X("ms:Q", scale=scale, axis=axis),
        color("time", kinds, [INK, SERIES[0]]),
        alt.Shape("time:N", scale=shape, legend=alt.Legend(title=None)),
    )
    return alt.layer(intervals, points).properties(width=420, height=alt.Step(20))
