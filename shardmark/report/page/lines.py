"""Lines over a case's size, with the limit of the hardware or what a model says; and published figures beside ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardmark.report.page.figure import MOST_LINES, Absent, Cell, Drawn, Figure, first, in_unit, titled
from shardmark.report.page.vega import DASH, INK, SERIES, Spec, log_ticks, room, series, stand_ins
from shardmark.report.plots import Lines, Points, apart, finite, labels, line_names, number
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

_WIDTH, _HEIGHT = 560, 280
_HERE = "this run"


def lines(plot: Lines, entries: Sequence[Entry]) -> Drawn:
    """The plot of those rows that have its figures, where some line goes through two sizes or more."""
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
    return Figure(f"{plot.title}{only}", _lines_spec(plot, shown), columns, rows, notes)


def _measured(plot: Lines, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A point for each row; and one of the limit for each of its sizes."""
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
    """What the model of this row says, and where it is least."""
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


def _lines_spec(plot: Lines, data: list[dict[str, Any]]) -> Spec:
    sizes = sorted({each["x"] for each in data if each["kind"] in ("measured", "limit")})
    panels = len({each["panel"] for each in data})
    measured = list(dict.fromkeys(each["name"] for each in data if each["kind"] == "measured"))
    models = list(dict.fromkeys(each["name"] for each in data if each["kind"] != "measured"))
    names = [*measured, *models]
    colors, shapes = map(list, zip(*series(len(names)), strict=True))
    if plot.limit is not None:
        colors[len(measured) :], shapes[len(measured) :] = [INK], [DASH]
    width = (_WIDTH - 60 * (panels - 1)) / panels if panels > 1 else _WIDTH
    legend = {"title": None, "symbolStrokeWidth": 2}
    ticks = {"values": log_ticks(each["y"] for each in data)} if plot.log_y else {}
    encoding = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "scale": {"type": "log", "base": 2, "nice": False, "padding": 12},
            "axis": {"title": plot.x_title or plot.x, "values": sizes, "format": ",.6~r", "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "scale": {"type": "log" if plot.log_y else "linear"},
            "axis": {"title": titled(plot.y_title or plot.y, plot.unit), "format": ",.6~r"} | ticks,
        },
        "color": {
            "field": "name",
            "type": "nominal",
            "scale": {"domain": names, "range": colors},
            "legend": legend,
        },
        "shape": {"field": "name", "type": "nominal", "scale": {"domain": names, "range": shapes}, "legend": legend},
    }
    line = {key: encoding[key] for key in ("x", "y", "color")}
    said = {"mark": {"type": "line", "strokeDash": [6, 4]}, "encoding": line}
    marks = {"mark": {"type": "point", "filled": True, "size": 55}, "encoding": encoding}
    best = {"mark": {"type": "point", "filled": False, "size": 160, "strokeWidth": 2}, "encoding": encoding}
    layer: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": line, "transform": [{"filter": "datum.kind === 'measured'"}]},
        {**said, "transform": [{"filter": "datum.kind === 'limit' || datum.kind === 'model'"}]},
        {**marks, "transform": [{"filter": "datum.kind === 'measured'"}]},
        {**best, "transform": [{"filter": "datum.kind === 'least by the model'"}]},
    ]
    if panels == 1:
        return {"data": {"values": data}, "width": width, "height": _HEIGHT, "layer": layer}
    return {
        "data": {"values": data},
        "facet": {"column": {"field": "panel", "type": "nominal", "sort": None}},
        "spec": {"width": math.floor(width), "height": _HEIGHT, "layer": layer},
    }


def points(plot: Points, entries: Sequence[Entry]) -> Drawn:
    """Our figures filled, and hollow those that were published, metric by metric."""
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
    return Figure(plot.title, {"hconcat": panels, "spacing": 12}, columns, rows, notes, shown)


def _points_panel(plot: Points, data: list[dict[str, Any]], metric: str, width: float | None) -> Spec:
    names = list(dict.fromkeys(each["name"] for each in data))
    whose = list(dict.fromkeys(each["of"] for each in data))
    axis = {"title": None, "domain": False, "grid": True, "labels": width is not None, "minExtent": width or 0}
    ticks = {"values": log_ticks(each["value"] for each in data if each["metric"] == metric)}
    encoding = {
        "y": {"field": "name", "type": "nominal", "sort": None, "scale": {"domain": names}, "axis": axis},
        "x": {
            "field": "value",
            "type": "quantitative",
            "scale": {"type": "log"},
            "axis": {"title": titled(metric, plot.units[metric]), "format": ",.6~r", "labelOverlap": True} | ticks,
        },
        "color": {
            "field": "of",
            "type": "nominal",
            "scale": {"domain": whose, "range": SERIES[: len(whose)]},
            "legend": {"title": None, "columns": 2},
        },
    }
    return {
        "data": {"values": [each for each in data if each["metric"] == metric]},
        "width": 230,
        "height": {"step": 18},
        "layer": [
            {
                "mark": {"type": "point", "filled": filled, "size": 70, "strokeWidth": 2},
                "encoding": encoding,
                "transform": [{"filter": f"datum.of {'===' if filled else '!=='} '{_HERE}'"}],
            }
            for filled in (True, False)
        ],
    }
