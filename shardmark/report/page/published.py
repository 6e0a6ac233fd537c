"""Published figures beside this run's, on a page of their own: they are of other hardware and of sizes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from shardmark.report.page.figure import Absent, Cell, Drawn, Figure, first, in_unit, shown_as, ticks, titled
from shardmark.report.page.vega import SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.report.plots import UNITS, Points, apart, labels, number, restored
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of

_HERE = "this run"


def published(run: Entry) -> Iterator[tuple[str, list[Drawn]]]:
    """(question, plots) of each question of the run that has rows and declares published figures."""
    for question in run.get("questions", []):
        entries = [entry for entry in entries_of(run) if entry["group"] == question["text"]]
        plots = [restored(each) for each in question.get("plots", ())]
        drawn = [points(each, entries) for each in plots if isinstance(each, Points) and each.published]
        if entries and drawn:
            yield question["text"], drawn


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
    marks = [each | {"name": shorts[each["name"]], "tip": _tip(each, plot)} for each in data]
    panels = [("", _panel(plot, marks, metric, room(shown))) for metric in metrics]
    columns = ["row", "metric", "value", "unit", "of"]
    rows: list[list[Cell]] = [
        [each["name"], each["metric"], each["value"], UNITS[plot.units[each["metric"]]][1], each["of"]] for each in data
    ]
    sources = dict.fromkeys(each.source for each in plot.published)
    notes.append(f"Hollow: published by {', '.join(sources)}, on hardware and in sizes of their own.")
    return Figure(plot.title, panels, columns, rows, notes, shown, stacked=True)


def _tip(each: dict[str, Any], plot: Points) -> str:
    unit = UNITS[plot.units[each["metric"]]][1]
    return f"{each['name']} | {each['metric']} {shown_as(each['value'])} {unit} | {each['of']}"


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
        base.mark_point(filled=filled, size=70, strokeWidth=2, aria=True).transform_filter(
            f"datum.of {'===' if filled else '!=='} '{_HERE}'"
        )
        for filled in (True, False)
    ]
    return alt.layer(*layers).properties(width=300, height=alt.Step(18))
