"""Lines over a case's size, labelled at their ends, beside the hardware's limit or a model's curve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from shardmark.report.page.figure import MOST_LINES, Absent, Cell, Drawn, Figure, in_unit, shown_as, ticks, titled
from shardmark.report.page.vega import DASH, INK, Chart, chart, series
from shardmark.report.plots import UNITS, Lines, finite, line_names, number
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.text import cut

_WIDTH, _HEIGHT, _LABEL = 300, 230, 14
"""Pixels of a panel, and of a label's line."""
NEAR = 3
"""Pixels within which two lines coincide."""
_FORMAT = ",.6~r"

Record = dict[str, Any]


def lines(plot: Lines, entries: Sequence[Entry]) -> Drawn:
    """The plot of the rows that have its figures; Absent unless some panel has two sizes."""
    data = _measured(plot, [each for each in entries if _points(plot, each)])
    if plot.curve is not None:
        data += [each for entry in entries for each in _curve(plot, entry)]
    data = [each for each in data if each["y"] is not None and each["x"] > 0 and (each["y"] > 0 or not plot.log_y)]
    sizes = dict.fromkeys((each["panel"], each["x"]) for each in data)
    of_several = [panel for panel, count in Counter(panel for panel, _ in sizes).items() if count > 1]
    data = [each for each in data if each["panel"] in of_several]
    if not data:
        return Absent(plot.title, f"It takes rows of two values of {plot.x_title or plot.x} or more.")
    notes = []
    widths = Counter(key for key, _ in dict.fromkeys(((each["panel"], each["name"]), each["x"]) for each in data))
    if (alone := sum(width == 1 for width in widths.values())) < len(widths):
        data = [each for each in data if widths[each["panel"], each["name"]] > 1]
        notes += [f"{alone} {'row' if alone == 1 else 'rows'} of one size alone: see the table."] if alone else []
    columns = ["line", plot.x_title or plot.x, titled(plot.y_title or plot.y, plot.unit)]
    rows: list[list[Cell]] = [[each["name"], each["x"], each["y"]] for each in data]
    if plot.panels is not None:
        columns = [plot.panels.rpartition(".")[2], *columns]
        rows = [[each["panel"], *row] for row, each in zip(rows, data, strict=True)]
    names = list(dict.fromkeys(each["name"] for each in data))
    notes += [f"The first {MOST_LINES} of {len(names)} lines; the table has all."] if len(names) > MOST_LINES else []
    shown = [each for each in data if each["name"] in (*names[:MOST_LINES], plot.limit_title)]
    notes += [f"Dashed: {plot.limit_title}."] if plot.limit is not None else []
    notes += [f"Dashed: {plot.curve_title}; hollow: where that is least."] if plot.curve is not None else []
    panels = _panels(plot, shown, of_several)
    if any(each.shared for _, each in panels):
        notes.append("Lines that coincide take turns along their way, and their points are rings around each other.")
    return Figure(plot.title, [(heading, each.chart()) for heading, each in panels], columns, rows, notes)


def _measured(plot: Lines, entries: Sequence[Entry]) -> list[Record]:
    """The points of each row, and the limit at each row's size."""
    data: list[Record] = []
    for entry, name in zip(entries, line_names(entries, plot.x, *([plot.panels] if plot.panels else [])), strict=True):
        panel = str(figure(entry, plot.panels)) if plot.panels else ""
        data += [
            {"name": name, "x": x, "y": in_unit(y, plot.unit), "kind": "measured", "panel": panel}
            for x, y in _points(plot, entry)
        ]
        if plot.limit is not None:
            limit = in_unit(number(entry, plot.limit), plot.unit)
            data.append({**data[-1], "name": plot.limit_title, "y": limit, "kind": "limit"})
    if plot.start is not None:
        start = {"x": plot.start[0], "y": in_unit(plot.start[1], plot.unit)}
        data += [each | start for each in data]
    return list({tuple(each.items()): each for each in data}.values())


def _points(plot: Lines, entry: Entry) -> list[tuple[float, float | None]]:
    """The row's point, or one for each value of its list."""
    if isinstance(found := figure(entry, plot.y), list):
        return [(float(place), finite(value)) for place, value in enumerate(found, 1)]
    x, y = number(entry, plot.x), finite(found)
    return [] if x is None or y is None else [(x, y)]


def _curve(plot: Lines, entry: Entry) -> list[Record]:
    """Points of the curve that a row's model predicts, and its minimum."""
    found = figure(entry, plot.curve or "")
    if not isinstance(found, dict):
        return []
    name = f"{entry['extra_info']['implementation']} {plot.curve_title}"
    points: list[Record] = [
        {"name": name, "x": float(x), "y": in_unit(finite(y), plot.unit), "kind": "model", "panel": ""}
        for x, y in found.items()
    ]
    if plot.best is not None:
        x, y = (number(entry, where) for where in plot.best)
        if x is not None and y is not None:
            best = {"name": name, "x": in_unit(x * plot.x_scale, ""), "y": in_unit(y, plot.unit)}
            points += [{**best, "kind": kind, "panel": ""} for kind in ("model", "least by the model")]
    return points


def _panels(plot: Lines, data: Sequence[Record], panels: Sequence[str]) -> list[tuple[str, _Panel]]:
    """A panel for each part of the rows, all with the same y axis, and each line in the same colour in all."""
    measured = dict.fromkeys(each["name"] for each in data if each["kind"] == "measured")
    names = [*measured, *dict.fromkeys(each["name"] for each in data if each["name"] not in measured)]
    styles = dict(zip(names, series(len(names)), strict=True))
    if plot.limit is not None:
        styles[plot.limit_title] = INK, DASH
    values = [each["y"] for each in data]
    low, high = min(values), max(values)
    margin = 1.15 if plot.log_y else 0.05 * ((high - low) or 1.0)
    domain = (low / margin, high * margin) if plot.log_y else (min(0.0, low), high + margin)
    return [(name, _Panel(plot, [each for each in data if each["panel"] == name], styles, domain)) for name in panels]


@dataclass(frozen=True)
class _Panel:
    """The lines of one panel; `styles` are the colour and shape of each name, `domain` the ends of the y axis."""

    plot: Lines
    data: Sequence[Record]
    styles: Mapping[str, tuple[str, str]]
    domain: tuple[float, float]

    @property
    def _lines(self) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for each in sorted(self.data, key=lambda record: record["x"]):
            if each["kind"] != "least by the model":
                found.setdefault(each["name"], []).append(each)
        return {name: found[name] for name in self.styles if name in found}

    @property
    def shared(self) -> dict[str, tuple[int, int]]:
        """By the name of each line that coincides with others: its place among them, and their number."""
        at = {name: {each["x"]: self._pixel(each["y"]) for each in line} for name, line in self._lines.items()}
        groups: list[list[str]] = []
        for name, mine in at.items():
            for group in groups:
                theirs = at[group[0]]
                both = mine.keys() & theirs.keys()
                if both and sum(abs(mine[x] - theirs[x]) <= NEAR for x in both) > len(both) / 2:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return {name: (place, len(group)) for group in groups if len(group) > 1 for place, name in enumerate(group)}

    def _pixel(self, value: float) -> float:
        """Pixels from the bottom."""
        low, high = self.domain
        if self.plot.log_y:
            return _HEIGHT * math.log(value / low) / math.log(high / low)
        return _HEIGHT * (value - low) / (high - low)

    def _value(self, pixel: float) -> float:
        low, high = self.domain
        share = pixel / _HEIGHT
        return float(low * (high / low) ** share if self.plot.log_y else low + share * (high - low))

    def _labels(self) -> list[Record]:
        """Each line's name right of its end, moved up or down until none covers another."""
        ends = sorted((self._pixel(line[-1]["y"]), name) for name, line in self._lines.items())
        places: list[float] = []
        for pixel, _ in ends:
            places.append(max(pixel, places[-1] + _LABEL) if places else pixel)
        top = _HEIGHT + _LABEL / 2
        for place in range(len(places) - 1, -1, -1):
            places[place] = min(places[place], top)
            top = places[place] - _LABEL
        return [
            {"name": name, "label": cut(name, 36), "y": self._value(place), "end": self._value(pixel)}
            for (pixel, name), place in zip(ends, places, strict=True)
        ]

    def chart(self) -> Chart:
        """The lines, their points and their labels."""
        plot, shared = self.plot, self.shared
        sizes = sorted({each["x"] for each in self.data if each["kind"] in ("measured", "limit")})
        least, most = (pick(each["x"] for each in self.data) for pick in (min, max))
        pad = (most / least) ** 0.05
        scale = alt.Scale(type="log", base=2, nice=False, domain=[least / pad, most * pad])
        axis = alt.Axis(title=plot.x_title or plot.x, values=sizes, format=_FORMAT, grid=False, labelOverlap=True)
        x = alt.X("x:Q", scale=scale, axis=axis)
        y_axis = alt.Axis(title=titled(plot.y_title or plot.y, plot.unit), format=_FORMAT)
        if plot.log_y:
            y_axis["values"] = ticks(self.domain)
        y_scale = alt.Scale(type="log" if plot.log_y else "linear", domain=[*self.domain], nice=False)
        y = alt.Y("y:Q", scale=y_scale, axis=y_axis)
        layers: list[alt.Chart] = []
        for name, line in self._lines.items():
            colour, shape = self.styles[name]
            place, count = shared.get(name, (0, 1))
            is_drawn = line[0]["kind"] == "measured"
            dashes: dict[str, Any] = {} if is_drawn else {"strokeDash": [6, 4]}
            if count > 1 and is_drawn:
                dashes = {"strokeDash": [8, 8 * (count - 1)], "strokeDashOffset": -8 * place}
            base = chart([{**each, "tip": self._tip(each)} for each in line]).encode(x, y)
            layers.append(base.mark_line(color=colour, **dashes))
            if is_drawn:
                size = 50 + 90 * place
                points = base.mark_point(filled=not place, color=colour, shape=shape, size=size, aria=True)
                layers.append(points.encode(alt.Description("tip:N")))
        for each in (record for record in self.data if record["kind"] == "least by the model"):
            colour, shape = self.styles[each["name"]]
            base = chart([{**each, "tip": self._tip(each)}]).encode(x, y, alt.Description("tip:N"))
            layers.append(base.mark_point(filled=False, color=colour, shape=shape, size=160, strokeWidth=2, aria=True))
        layers += self._label_layers(x, y, most, most * pad)
        return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)

    def _label_layers(self, x: alt.X, y: alt.Y, most: float, edge: float) -> list[alt.Chart]:
        lasts = {name: line[-1]["x"] for name, line in self._lines.items()}
        layers: list[alt.Chart] = []
        for each in self._labels():
            base = chart([{**each, "x": edge, "from": lasts[each["name"]]}])
            colour, shape = self.styles[each["name"]]
            lead = base.mark_rule(color=colour, strokeWidth=1, strokeDash=[1, 2])
            layers.append(lead.encode(alt.X("from:Q"), alt.X2("x"), alt.Y("end:Q"), alt.Y2("y")))
            layers.append(base.mark_point(filled=True, color=colour, shape=shape, size=40, xOffset=6).encode(x, y))
            layers.append(base.mark_text(align="left", dx=14).encode(x, y, alt.Text("label:N")))
        return layers

    def _tip(self, record: Record) -> str:
        unit = UNITS[self.plot.unit][1]
        title = self.plot.x_title or self.plot.x
        return f"{record['name']} | {title} {record['x']:g} | {shown_as(record['y'])} {unit}".rstrip()
