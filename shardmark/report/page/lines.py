"""Lines over a case's size, beside the hardware's limit or a model's curve; and published figures beside ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from shardmark.report.page.figure import MOST_LINES, Absent, Cell, Drawn, Figure, first, in_unit, titled
from shardmark.report.page.vega import (
    DASH,
    INK,
    SERIES,
    Chart,
    chart,
    color,
    log_ticks,
    names_axis,
    room,
    series,
    stand_ins,
)
from shardmark.report.plots import Lines, Points, apart, finite, labels, line_names, number
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

_WIDTH, _HEIGHT = 560, 280
_HERE = "this run"
_FORMAT = ",.6~r"
_LEGEND = alt.Legend(title=None, symbolStrokeWidth=2)


def lines(plot: Lines, entries: Sequence[Entry]) -> Drawn:
    """The plot of the rows that have its figures; Absent unless some panel has two sizes."""
    data = _measured(plot, [each for each in entries if None not in (number(each, plot.x), number(each, plot.y))])
    if plot.curve is not None:
        data += [each for entry in entries for each in _curve(plot, entry)]
    data = [each for each in data if each["y"] is not None and each["x"] > 0 and (each["y"] > 0 or not plot.log_y)]
    sizes = dict.fromkeys((each["panel"], each["x"]) for each in data)
    of_several = [panel for panel, times in Counter(panel for panel, _ in sizes).items() if times > 1]
    data = [each for each in data if each["panel"] in of_several]
    if not data:
        return Absent(plot.title, f"It takes rows of two values of {plot.x_title or plot.x} or more.")
    columns = ["line", plot.x_title or plot.x, titled(plot.y_title or plot.y, plot.unit)]
    rows: list[list[Cell]] = [[each["name"], each["x"], each["y"]] for each in data]
    if plot.panels is not None:
        columns = [plot.panels.rpartition(".")[2], *columns]
        rows = [[each["panel"], *row] for row, each in zip(rows, data, strict=True)]
    names = list(dict.fromkeys(each["name"] for each in data))
    notes = [f"The first {MOST_LINES} of {len(names)} lines; the table has all."] if len(names) > MOST_LINES else []
    shown = [each for each in data if each["name"] in (*names[:MOST_LINES], plot.limit_title)]
    notes += [f"Dashed: {plot.limit_title}."] if plot.limit is not None else []
    notes += [f"Dashed: {plot.curve_title}; hollow: where that is least."] if plot.curve is not None else []
    only = f": {of_several[0]}" if plot.panels is not None and len(of_several) == 1 else ""
    return Figure(f"{plot.title}{only}", _lines_chart(plot, shown), columns, rows, notes)


def _measured(plot: Lines, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A point for each row, and the limit at each row's size."""
    data: list[dict[str, Any]] = []
    for entry, name in zip(entries, line_names(entries, plot.x, *([plot.panels] if plot.panels else [])), strict=True):
        panel = str(figure(entry, plot.panels)) if plot.panels else ""
        x, y = number(entry, plot.x), in_unit(number(entry, plot.y), plot.unit)
        data.append({"name": name, "x": x, "y": y, "kind": "measured", "panel": panel})
        if plot.limit is not None:
            limit = in_unit(number(entry, plot.limit), plot.unit)
            data.append({"name": plot.limit_title, "x": x, "y": limit, "kind": "limit", "panel": panel})
    if plot.start is not None:
        start = {"x": plot.start[0], "y": in_unit(plot.start[1], plot.unit)}
        data += [each | start for each in data]
    return list({tuple(each.items()): each for each in data}.values())


def _curve(plot: Lines, entry: Entry) -> list[dict[str, Any]]:
    """Points of the curve that a row's model predicts, and its minimum."""
    found = figure(entry, plot.curve or "")
    if not isinstance(found, dict):
        return []
    name = f"{entry['extra_info']['implementation']} {plot.curve_title}"
    points = [
        {"name": name, "x": float(x), "y": in_unit(finite(y), plot.unit), "kind": "model", "panel": ""}
        for x, y in found.items()
    ]
    if plot.best is not None:
        x, y = (number(entry, where) for where in plot.best)
        if x is not None and y is not None:
            best = {"name": name, "x": in_unit(x * plot.x_scale, ""), "y": in_unit(y, plot.unit)}
            points += [{**best, "kind": kind, "panel": ""} for kind in ("model", "least by the model")]
    return points


def _lines_chart(plot: Lines, data: list[dict[str, Any]]) -> Chart:
    sizes = sorted({each["x"] for each in data if each["kind"] in ("measured", "limit")})
    panels = len({each["panel"] for each in data})
    measured = list(dict.fromkeys(each["name"] for each in data if each["kind"] == "measured"))
    models = list(dict.fromkeys(each["name"] for each in data if each["kind"] != "measured"))
    names = [*measured, *models]
    colors, shapes = map(list, zip(*series(len(names)), strict=True))
    if plot.limit is not None:
        colors[len(measured) :], shapes[len(measured) :] = [INK], [DASH]
    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(title=plot.x_title or plot.x, values=sizes, format=_FORMAT, grid=False),
    )
    y_axis = alt.Axis(title=titled(plot.y_title or plot.y, plot.unit), format=_FORMAT)
    if plot.log_y:
        y_axis["values"] = log_ticks(each["y"] for each in data)
    y = alt.Y("y:Q", scale=alt.Scale(type="log" if plot.log_y else "linear"), axis=y_axis)
    shape = alt.Shape("name:N", scale=alt.Scale(domain=names, range=shapes), legend=_LEGEND)
    base = alt.Chart().encode(x, y, alt.Color("name:N", scale=alt.Scale(domain=names, range=colors), legend=_LEGEND))
    layers = [
        base.mark_line().transform_filter("datum.kind === 'measured'"),
        base.mark_line(strokeDash=[6, 4]).transform_filter("datum.kind === 'limit' || datum.kind === 'model'"),
        base.mark_point(filled=True, size=55).encode(shape).transform_filter("datum.kind === 'measured'"),
        base.mark_point(filled=False, size=160, strokeWidth=2)
        .encode(shape)
        .transform_filter("datum.kind === 'least by the model'"),
    ]
    chart = alt.layer(*layers, data=alt.InlineData(tuple(data)))
    if panels == 1:
        return chart.properties(width=_WIDTH, height=_HEIGHT)
    width = math.floor((_WIDTH - 60 * (panels - 1)) / panels)
    return chart.properties(width=width, height=_HEIGHT).facet(column=alt.Column("panel:N", sort=None))


def points(plot: Points, entries: Sequence[Entry]) -> Drawn:
    """Our figures filled, published ones hollow; one panel for each metric."""
    notes: list[str] = []
    data: list[dict[str, Any]] = [
        {"name": label, "metric": metric, "value": in_unit(value, plot.units[metric]), "of": _HERE}
        for label, entry in zip(labels(entries), first(entries, notes), strict=False)
        for metric, where in plot.ours.items()
        if (value := number(entry, where))
    ]
    if not data:
        return Absent(plot.title, "No row of this run has those figures.")
    cases = dict.fromkeys(each.case for each in plot.published)
    names = dict(zip(cases, apart(cases), strict=True))
    data += [
        {"name": names[each.case], "metric": each.metric, "value": in_unit(each.value, plot.units[each.metric])}
        | {"of": f"published, on {each.hardware}"}
        for each in plot.published
        if each.metric in plot.ours and each.value > 0
    ]
    metrics = [metric for metric in plot.ours if any(each["metric"] == metric for each in data)]
    shown = list(dict.fromkeys(each["name"] for each in data))
    shorts = stand_ins(shown)
    marks = [each | {"name": shorts[each["name"]]} for each in data]
    panels = [_points_panel(plot, marks, metric, room(shown) if metric == metrics[0] else None) for metric in metrics]
    columns = ["row", "metric", "value", "unit", "of"]
    rows: list[list[Cell]] = [
        [each["name"], each["metric"], each["value"], titled("", plot.units[each["metric"]])[2:], each["of"]]
        for each in data
    ]
    sources = dict.fromkeys(each.source for each in plot.published)
    if sources:
        notes.append(f"Hollow: published by {', '.join(sources)}, on hardware and in sizes of their own.")
    return Figure(plot.title, alt.hconcat(*panels, spacing=12), columns, rows, notes, shown)


def _points_panel(plot: Points, data: list[dict[str, Any]], metric: str, width: float | None) -> Chart:
    names = list(dict.fromkeys(each["name"] for each in data))
    whose = list(dict.fromkeys(each["of"] for each in data))
    marks = [each for each in data if each["metric"] == metric]
    ticks = log_ticks(each["value"] for each in marks)
    axis = alt.Axis(title=titled(metric, plot.units[metric]), format=_FORMAT, labelOverlap=True, values=ticks)
    base = chart(marks).encode(
        names_axis("name", names, width or 0, domain=False, grid=True, labels=width is not None),
        alt.X("value:Q", scale=alt.Scale(type="log"), axis=axis),
        color("of", whose, SERIES[: len(whose)], columns=2),
    )
    layers = [
        base.mark_point(filled=filled, size=70, strokeWidth=2).transform_filter(
            f"datum.of {'===' if filled else '!=='} '{_HERE}'"
        )
        for filled in (True, False)
    ]
    return alt.layer(*layers).properties(width=230, height=alt.Step(18))
