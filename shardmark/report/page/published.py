"""Published figures on a page of their own: beside this run's of the same sizes on the same hardware, otherwise beside
what is predicted for theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import altair as alt

from shardmark.meter.hardware import known_hardware
from shardmark.report.page.figure import Absent, Cell, Drawn, Figure, first, in_unit, shown_as, ticks, titled
from shardmark.report.page.vega import SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.report.plots import UNITS, Points, Published, apart, labels, number, restored
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of

_HERE = "this run"
_KINDS = {"run": ("circle", True), "published": ("circle", False), "predicted": ("cross", True)}
"""Shape of each kind's points, and whether they are filled."""
ALIKE = 0.02
"""Relative difference of two reports of one GPU's memory: drivers differ by some 0.2%, a chip's sizes by far more."""


@dataclass(frozen=True)
class _Line:
    """A line of the table, its figures in `unit`."""

    name: str
    metric: str
    unit: str
    published: float | None
    on: str
    ours: float | None
    predicted: float | None
    row: str
    """Our row."""

    @property
    def ratio(self) -> Cell:
        """Our figure, or the predicted one, divided by the published one."""
        beside = self.ours or self.predicted
        return float(f"{beside / self.published:.3g}") if beside and self.published else None

    def marks(self, predicted_on: str) -> Iterator[dict[str, Any]]:
        """The line's points; the predicted one only where nothing was measured."""
        found = [("published", self.published, f"published, on {self.on}"), ("run", self.ours, _HERE)]
        found += [("predicted", self.predicted, f"predicted for {predicted_on}")] if not self.ours else []
        for kind, value, of in found:
            if value:
                tip = f"{self.name} | {self.metric} {shown_as(value)} {self.unit} | {of}"
                yield {"name": self.name, "metric": self.metric, "value": value, "kind": kind, "of": of, "tip": tip}


def published(run: Entry) -> Iterator[tuple[str, list[Drawn]]]:
    """(question, plots) of each question of the run that has rows and declares published figures."""
    for question in run.get("questions", []):
        entries = [entry for entry in entries_of(run) if entry["group"] == question["text"]]
        plots = [restored(each) for each in question.get("plots", ())]
        drawn = [
            points(each, entries, run["machine_info"]) for each in plots if isinstance(each, Points) and each.published
        ]
        if entries and drawn:
            yield question["text"], drawn


def points(plot: Points, entries: Sequence[Entry], machine: Mapping[str, Any] | None = None) -> Drawn:
    """Our figures filled, published ones hollow, predicted ones as crosses; one panel for each metric."""
    notes: list[str] = []
    named = zip(labels(entries), first(entries, notes) if plot.ours else (), strict=False)
    lines = [
        (_Line(label, metric, UNITS[plot.units[metric]][1], None, "", in_unit(value, plot.units[metric]), None, ""), "")
        for label, entry in named
        for metric, where in plot.ours.items()
        if (value := number(entry, where))
    ]
    if plot.ours and not lines:
        return Absent(plot.title, "No row of this run has those figures.")
    cases = dict.fromkeys(each.case for each in plot.published)
    names = dict(zip(cases, apart(cases), strict=True))
    lines += [
        (_beside(each, names[each.case], plot.units[each.metric], entries, machine or {}), each.on)
        for each in plot.published
        if each.metric in plot.units and each.value > 0
    ]
    data = [mark for line, on in lines for mark in line.marks(on)]
    metrics = [metric for metric in plot.units if any(each["metric"] == metric for each in data)]
    shown = list(dict.fromkeys(each["name"] for each in data))
    shorts = stand_ins(shown)
    marks = [each | {"name": shorts[each["name"]]} for each in data]
    panels = [("", _panel(plot, marks, metric, room(shown))) for metric in metrics]
    columns = ["row", "metric", "unit", "published", "on", _HERE, "predicted", "our row", "ratio to published"]
    rows: list[list[Cell]] = [[*astuple(line), line.ratio] for line, _ in lines]
    kinds = {each["kind"] for each in data}
    if sources := dict.fromkeys(each.source for each in plot.published):
        notes.append(f"Hollow: published by {', '.join(sources)}, on hardware and in sizes of their own.")
    if "predicted" in kinds:
        notes.append("Cross: predicted for the program and the hardware of the published figure, not measured.")
    notes += [plot.note] if plot.note else []
    return Figure(plot.title, panels, columns, rows, notes, shown, stacked=True)


def _beside(each: Published, name: str, unit: str, entries: Sequence[Entry], machine: Mapping[str, Any]) -> _Line:
    """The figure, and beside it the row of the same sizes on the same hardware."""
    row, ours = "", None
    for entry in entries:
        own = entry["extra_info"]
        named = f"{own['implementation']} {own['case']['id']} {own['world_size']}"
        same = each.row and re.fullmatch(each.row, named) and _is_on(each.on, own, machine)
        if same and (found := number(entry, each.where)):
            row, ours = f"{own['implementation']} · {own['case']['id']}", found
    value, predicted = in_unit(each.value, unit), in_unit(each.predicted, unit)
    return _Line(name, each.metric, UNITS[unit][1], value, each.hardware, in_unit(ours, unit), predicted, row)


def _is_on(name: str, row: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Whether the row is of the known hardware of that name: predicted for it, or measured on it."""
    if row.get("simulated") or name not in known_hardware():
        return row.get("hardware") == name
    gpus, chip = machine.get("gpus") or [""], name.partition("-")[0]
    same = re.search(rf"\b{chip}\b", gpus[0], re.IGNORECASE) and ("pcie" in name) == ("pcie" in gpus[0].lower())
    return bool(same) and abs(machine["device_bytes"] / known_hardware()[name].memory_bytes - 1) <= ALIKE


def _panel(plot: Points, data: list[dict[str, Any]], metric: str, width: float) -> Chart:
    marks = [each for each in data if each["metric"] == metric]
    names = list(dict.fromkeys(each["name"] for each in marks))
    whose = list(dict.fromkeys(each["of"] for each in data))
    axis = alt.Axis(
        title=titled(metric, plot.units[metric]),
        format=",.6~r",
        labelOverlap=True,
        values=ticks(each["value"] * margin for each in marks for margin in (0.5, 2)),
    )
    base = chart(marks).encode(
        names_axis("name", names, width, domain=False, grid=True),
        alt.X("value:Q", scale=alt.Scale(type="log"), axis=axis),
        color("of", whose, SERIES[: len(whose)], columns=2),
        alt.Description("tip:N"),
    )
    layers = [
        base.mark_point(shape=shape, filled=filled, size=70, strokeWidth=2, aria=True).transform_filter(
            f"datum.kind === '{kind}'"
        )
        for kind, (shape, filled) in _KINDS.items()
    ]
    return alt.layer(*layers).properties(width=300, height=alt.Step(18))
