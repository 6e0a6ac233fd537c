"""Predicted times beside measured ones of the same tests, and the errors of the predictions."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from shardmark.report.page.figure import Cell, Figure, first, in_unit
from shardmark.report.page.predicted import predicted_interval
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.rows.reader import entries_of


def is_predicted(run: Entry) -> bool:
    """Whether the run is a simulation."""
    return any(entry["extra_info"].get("simulated") for entry in entries_of(run))


def prediction_errors(predicted: Entry, measured: Entry) -> Figure | None:
    """Predicted times with intervals beside measured ones of the same tests; None if no test is in both runs."""
    medians = {entry["fullname"]: entry["stats"]["median"] for entry in measured["benchmarks"]}
    found = [
        entry for entry in predicted["benchmarks"] if entry["fullname"] in medians and figure(entry, "time.predicted")
    ]
    if not found:
        return None
    notes = ["Bars: the interval predicted to hold 9 of 10 steps. Error: of the predicted time."]
    names = [entry["fullname"].partition("::")[2] or entry["fullname"] for entry in found]
    rows: list[list[Cell]] = []
    for name, entry in zip(names, found, strict=True):
        step, own = entry["stats"]["median"], medians[entry["fullname"]]
        seconds = (in_unit(each, "s") for each in (step, *(predicted_interval(entry) or (step, step)), own))
        rows.append([name, *seconds, f"{100 * (step / own - 1):+.1f}%" if own else ""])
    columns = ["test", "predicted ms", "from", "to", "measured ms", "error"]
    shown = list(first([dict(zip(columns, row, strict=True)) for row in rows], notes))
    return Figure("Predicted beside measured", [("", _drawn(shown))], columns, rows, notes, names)


def _drawn(shown: Sequence[Entry]) -> Chart:
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
