"""Bars, a row each: time and peak side by side, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from shardmark.meter.kernels import CATEGORIES
from shardmark.report.page.figure import Cell, Figure, first, in_unit, shown_as, titled
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.report.plots import finite, labels, number
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

PARTS = ("forward", "backward", "communication", "optimizer")
"""Parts of a step that are drawn; a test may time others."""

_TENSORS, _WORKSPACE, _FORMULA = "tensors", "workspace", "formula of the tensors"
_WIDTH, _HEIGHT, _BAR = 200, alt.Step(20), 13


def time_and_peak(entries: Sequence[Entry]) -> Figure | None:
    """Step time and peak of each row as paired bars, with the formula of the peak; None for fewer than two rows.

    A row without times has no time bar.
    """
    shown = [each for each in entries if number(each, "stats.median") is not None or figure(each, "memory.tensors")]
    if len(shown) < 2:
        return None
    notes: list[str] = []
    columns = ["row", "step time ms", "q1 ms", "q3 ms", "tensors MiB", "workspace MiB", "formula MiB"]
    rows: list[list[Cell]] = []
    for label, entry in zip(labels(shown), first(shown, notes), strict=False):
        memory = entry["extra_info"]["memory"]
        times = (in_unit(number(entry, f"stats.{name}"), "s") for name in ("median", "q1", "q3"))
        nbytes = (in_unit(finite(memory.get(name)), "B") for name in ("tensors", "workspace", "formula"))
        rows.append([label, *times, *nbytes])
    names = [str(row[0]) for row in rows]
    numbers = [shown_as(each) for row in rows for each in (row[1], _sum(row)) if each is not None]
    shorts = stand_ins(dict.fromkeys([*names, *numbers]))
    panels = []
    if any(row[1] is not None for row in rows):
        panels.append(_time(rows, shorts, room(names)))
        notes.append("Time: the median of the rounds, with the quartiles; the times of a case are those of its pairs.")
    if any(row[4] is not None for row in rows):
        panels.append(_peak(rows, shorts, None if panels else room(names)))
    beside = room(numbers)  # of the bars, which may end where their panel does
    padding = {"left": 5, "top": 5, "bottom": 5, "right": beside}
    both = alt.hconcat(*panels, spacing=beside, padding=padding)
    return Figure("Step time and peak memory", both, columns, rows, notes, list(shorts))


def time_by_part(entries: Sequence[Entry]) -> Figure | None:
    """Each step's time divided into its parts; None if no row has more than one part."""
    shown = [each for each in entries if len(set(PARTS) & _parts(each).keys()) > 1]
    notes: list[str] = ["The mean of each part over rounds and ranks; communication is what the step waits for."]
    amounts = [
        (label, [(part, in_unit(finite(_parts(entry).get(part)), "s")) for part in PARTS])
        for label, entry in zip(labels(shown), first(shown, notes), strict=False)
    ]
    return _stacked("Where the step's time goes", "s", PARTS, amounts, notes) if shown else None


def time_by_kernel(entries: Sequence[Entry]) -> Figure | None:
    """Time of each phase of a step by kind of kernel; None if no row was profiled."""
    shown = [each for each in entries if isinstance(figure(each, "kernels.phases"), dict)]
    notes: list[str] = ["One step under the profiler, which slows the host: read the shares, not the times."]
    amounts = [
        (f"{label} {phase}", [(kind, in_unit(finite(found["categories"].get(kind)), "s")) for kind in CATEGORIES])
        for label, entry in zip(labels(shown), shown, strict=True)
        for phase, found in figure(entry, "kernels.phases").items()
    ]
    return _stacked("What kernels the time goes to", "s", CATEGORIES, amounts, notes) if shown else None


def _parts(entry: Entry) -> Entry:
    return found if isinstance(found := figure(entry, "time.parts"), dict) else {}


def _time(rows: Sequence[Sequence[Cell]], shorts: Mapping[str, str], width: float) -> Chart:
    data = [
        {"name": shorts[str(name)], "median": median, "low": low, "high": high, "number": shorts[shown_as(median)]}
        for name, median, low, high, *_ in rows
        if median is not None
    ]
    base = chart(data).encode(names_axis("name", [shorts[str(row[0])] for row in rows], width, domain=False))
    bars = base.mark_bar(height=_BAR, color=SERIES[0]).encode(
        alt.X("median:Q", axis=alt.Axis(title=titled("step time", "s"), tickCount=4))
    )
    spreads = base.mark_rule().encode(alt.X("low:Q"), alt.X2("high"))
    return alt.layer(bars, spreads, _number(base, "high")).properties(width=_WIDTH, height=_HEIGHT)


def _peak(rows: Sequence[Sequence[Cell]], shorts: Mapping[str, str], width: float | None) -> Chart:
    data = [
        {"name": shorts[str(name)], "part": part, "MiB": amount}
        for name, _, _, _, tensors, workspace, _ in rows
        for part, amount in ((_TENSORS, tensors), (_WORKSPACE, workspace))
    ]
    sums = [
        {
            "name": shorts[str(row[0])],
            "MiB": formula,
            "number": shorts[shown_as(peak)],
            "end": max(peak, formula or 0.0),
        }
        for row in rows
        for formula, peak in [(row[6], _sum(row))]
        if peak is not None and not isinstance(formula, str)
    ]
    y = names_axis("name", [shorts[str(row[0])] for row in rows], width, domain=False)
    kinds = color("part", [_TENSORS, _WORKSPACE, _FORMULA], [SERIES[1], SERIES[2], INK], columns=3, symbolType="square")
    axis = alt.Axis(title=titled("peak memory", "B"), tickCount=4)
    bars = chart(data).mark_bar(height=_BAR).encode(y, kinds, alt.X("MiB:Q", axis=axis), alt.Order("part:N"))
    base = chart(sums).encode(y)
    formulas = base.mark_tick(thickness=2, height=19).encode(alt.X("MiB:Q"), alt.ColorDatum(_FORMULA))
    return alt.layer(bars, formulas, _number(base, "end")).properties(width=_WIDTH, height=_HEIGHT)


def _number(base: alt.Chart, end: str) -> alt.Chart:
    """The bar's figure, right of its end."""
    return base.mark_text(align="left", dx=5).encode(alt.X(f"{end}:Q"), alt.Text("number:N"))


def _sum(row: Sequence[Cell]) -> float | None:
    """The peak in MiB: tensors plus workspace."""
    tensors, workspace = row[4:6]
    return tensors + (workspace if isinstance(workspace, float) else 0.0) if isinstance(tensors, float) else None


def _stacked(
    title: str,
    unit: str,
    parts: Sequence[str],
    amounts: Sequence[tuple[str, Sequence[tuple[str, float | None]]]],
    notes: Sequence[str],
) -> Figure:
    """A bar for each name, stacked from its parts."""
    rows: list[list[Cell]] = [[name, *(amount for _, amount in each)] for name, each in amounts]
    names = [name for name, _ in amounts]
    shorts = stand_ins(names)
    data = [
        {"name": shorts[str(row[0])], "part": part, "order": place, "amount": amount}
        for row in rows
        for place, (part, amount) in enumerate(zip(parts, row[1:], strict=True))
        if amount is not None
    ]
    present = [part for part in parts if any(each["part"] == part for each in data)]
    bars = (
        chart(data)
        .mark_bar(height=_BAR)
        .encode(
            names_axis("name", list(shorts.values()), room(names), domain=False),
            alt.X("amount:Q", axis=alt.Axis(title=titled("time", unit), tickCount=6)),
            color("part", present, [SERIES[parts.index(part)] for part in present], symbolType="square"),
            alt.Order("order:Q"),
        )
    )
    sized = bars.properties(width=2 * _WIDTH, height=_HEIGHT)
    return Figure(title, sized, ["row", *(f"{part} ms" for part in parts)], rows, notes, names)
