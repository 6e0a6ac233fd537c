"""Bars, a row each: time and peak side by side, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmark.meter.kernels import CATEGORIES
from shardmark.report.page.figure import Cell, Figure, first, in_unit, shown_as, titled
from shardmark.report.page.vega import INK, SERIES, Spec, room, stand_ins
from shardmark.report.plots import finite, labels, number
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

PARTS = ("forward", "backward", "communication", "optimizer")
"""Of a step; a test may time others."""

_TENSORS, _WORKSPACE, _FORMULA = "tensors", "workspace", "formula of the tensors"
_WIDTH = 200


def time_and_peak(entries: Sequence[Entry]) -> Figure | None:
    """For each row its step's time and its peak as paired bars, and the formula of the peak; None with less than two.

    A row without times has none in its bar.
    """
    shown = [each for each in entries if number(each, "stats.mean") is not None or "tensors" in _memory(each)]
    if len(shown) < 2:
        return None
    notes: list[str] = []
    columns = ["row", "step time ms", "± ms", "tensors MiB", "workspace MiB", "formula MiB"]
    rows: list[list[Cell]] = []
    for label, entry in zip(labels(shown), first(shown, notes), strict=False):
        memory = _memory(entry)
        times = (in_unit(number(entry, f"stats.{name}"), "s") for name in ("mean", "stddev"))
        nbytes = (in_unit(finite(memory.get(name)), "B") for name in ("tensors", "workspace", "formula"))
        rows.append([label, *times, *nbytes])
    names = [str(row[0]) for row in rows]
    numbers = [shown_as(each) for row in rows for each in (row[1], _sum(row)) if each is not None]
    shorts = stand_ins(dict.fromkeys([*names, *numbers]))
    panels = []
    if any(row[1] is not None for row in rows):
        panels.append(_time(rows, shorts, room(names)))
        notes.append("Time: the mean of the rounds, ± their standard deviation.")
    if any(row[3] is not None for row in rows):
        panels.append(_peak(rows, shorts, None if panels else room(names)))
    beside = room(numbers)  # of the bars, which may end where their panel does
    spec = {"hconcat": panels, "spacing": beside, "padding": {"left": 5, "top": 5, "bottom": 5, "right": beside}}
    return Figure("Step time and peak memory", spec, columns, rows, notes, list(shorts))


def time_by_part(entries: Sequence[Entry]) -> Figure | None:
    """How a step's time divides into its parts; None where no row has more than one."""
    shown = [each for each in entries if len(set(PARTS) & _parts(each).keys()) > 1]
    notes: list[str] = ["The mean of each part over rounds and ranks; communication is what the step waits for."]
    amounts = [
        (label, [(part, in_unit(finite(_parts(entry).get(part)), "s")) for part in PARTS])
        for label, entry in zip(labels(shown), first(shown, notes), strict=False)
    ]
    return _stacked("Where the step's time goes", "s", PARTS, amounts, notes) if shown else None


def time_by_kernel(entries: Sequence[Entry]) -> Figure | None:
    """What kind of kernels each phase of a step ran; None where none was profiled."""
    shown = [each for each in entries if isinstance(figure(each, "kernels.phases"), dict)]
    notes: list[str] = ["One step under the profiler, which slows the host: what counts is the shares."]
    amounts = [
        (f"{label} {phase}", [(kind, in_unit(finite(found["categories"].get(kind)), "s")) for kind in CATEGORIES])
        for label, entry in zip(labels(shown), shown, strict=True)
        for phase, found in figure(entry, "kernels.phases").items()
    ]
    return _stacked("What kernels the time goes to", "s", CATEGORIES, amounts, notes) if shown else None


def _memory(entry: Entry) -> Entry:
    memory: Entry = entry["extra_info"]["memory"]
    return memory


def _parts(entry: Entry) -> Entry:
    return found if isinstance(found := figure(entry, "time.parts"), dict) else {}


def _named(names: Sequence[str], width: float | None) -> Spec:
    """The rows from top to bottom, those without a bar in this panel too, their names in so many pixels."""
    axis = None if width is None else {"title": None, "domain": False, "minExtent": width}
    return {
        "field": "name",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": list(names)},
        "axis": axis,
    }


def _time(rows: Sequence[Sequence[Cell]], shorts: Mapping[str, str], width: float) -> Spec:
    data = [
        {"name": shorts[str(name)], "mean": mean, "low": max(0.0, mean - spread), "high": mean + spread}
        | {"number": shorts[shown_as(mean)]}
        for name, mean, spread, *_ in rows
        if isinstance(mean, float) and isinstance(spread, float)
    ]
    axis = {"title": titled("step time", "s"), "tickCount": 4}
    return {
        "data": {"values": data},
        "width": _WIDTH,
        "height": {"step": 20},
        "encoding": {"y": _named([shorts[str(row[0])] for row in rows], width)},
        "layer": [
            {
                "mark": {"type": "bar", "height": 13, "color": SERIES[0]},
                "encoding": {"x": {"field": "mean", "type": "quantitative", "axis": axis}},
            },
            {
                "mark": {"type": "rule"},
                "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
            },
            _number("high"),
        ],
    }


def _peak(rows: Sequence[Sequence[Cell]], shorts: Mapping[str, str], width: float | None) -> Spec:
    data = [
        {"name": shorts[str(name)], "part": part, "MiB": amount}
        for name, _, _, tensors, workspace, _ in rows
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
        for formula, peak in [(row[5], _sum(row))]
        if peak is not None and not isinstance(formula, str)
    ]
    legend = {"title": None, "columns": 3, "symbolType": "square"}
    kinds = {"domain": [_TENSORS, _WORKSPACE, _FORMULA], "range": [SERIES[1], SERIES[2], INK]}
    axis = {"title": titled("peak memory", "B"), "tickCount": 4}
    return {
        "width": _WIDTH,
        "height": {"step": 20},
        "encoding": {"y": _named([shorts[str(row[0])] for row in rows], width)},
        "layer": [
            {
                "data": {"values": data},
                "mark": {"type": "bar", "height": 13},
                "encoding": {
                    "x": {"field": "MiB", "type": "quantitative", "axis": axis},
                    "color": {"field": "part", "type": "nominal", "scale": kinds, "legend": legend},
                    "order": {"field": "part"},
                },
            },
            {
                "data": {"values": sums},
                "mark": {"type": "tick", "thickness": 2, "height": 19},
                "encoding": {"x": {"field": "MiB", "type": "quantitative"}, "color": {"datum": _FORMULA}},
            },
            {"data": {"values": sums}, **_number("end")},
        ],
    }


def _number(at: str) -> Spec:
    """The bar's figure, beside its end."""
    x = {"field": at, "type": "quantitative"}
    return {"mark": {"type": "text", "align": "left", "dx": 5}, "encoding": {"x": x, "text": {"field": "number"}}}


def _sum(row: Sequence[Cell]) -> float | None:
    """The peak: tensors and workspace."""
    tensors, workspace = row[3:5]
    return tensors + (workspace if isinstance(workspace, float) else 0.0) if isinstance(tensors, float) else None


def _stacked(
    title: str,
    unit: str,
    parts: Sequence[str],
    amounts: Sequence[tuple[str, Sequence[tuple[str, float | None]]]],
    notes: Sequence[str],
) -> Figure:
    """A bar for each name, of those parts."""
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
    kinds = {"domain": present, "range": [SERIES[parts.index(part)] for part in present]}
    spec = {
        "data": {"values": data},
        "width": 2 * _WIDTH,
        "height": {"step": 20},
        "mark": {"type": "bar", "height": 13},
        "encoding": {
            "y": _named(list(shorts.values()), room(names)),
            "x": {"field": "amount", "type": "quantitative", "axis": {"title": titled("time", unit), "tickCount": 6}},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": kinds,
                "legend": {"title": None, "symbolType": "square"},
            },
            "order": {"field": "order", "type": "quantitative"},
        },
    }
    return Figure(title, spec, ["row", *(f"{part} ms" for part in parts)], rows, notes, names)
