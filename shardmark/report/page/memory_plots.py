"""Memory: by kind through a step, against what the device has; and what is held after each stage of making a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardmark.meter.timeline import KINDS
from shardmark.report.page.figure import MOST_LINES, MOST_PLOTS, Absent, Cell, Drawn, Figure, in_unit, titled
from shardmark.report.page.vega import INK, SERIES, Spec, series
from shardmark.report.plots import finite, labels
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

MOMENTS = 100
"""Of a step that are drawn, each the largest of those it stands for; the row has up to 200."""
NEAR = 0.2
"""Of the device's memory: where a peak is less, the device's size would press all else to the bottom."""
_WIDTH, _HEIGHT = 560, 220


def by_kind(entries: Sequence[Entry], device_bytes: float | None) -> Iterator[Drawn]:
    """For each row that was observed so, the step's memory as stacked areas."""
    shown = [each for each in entries if figure(each, "memory.curve")]
    for label, entry in zip(labels(shown), shown[:MOST_PLOTS], strict=False):
        moments = _thinned(figure(entry, "memory.curve"))
        kinds = [kind for kind in KINDS if any(moment.get(kind) for moment in moments)]
        rows: list[list[Cell]] = [
            [place, *(in_unit(finite(moment.get(kind, 0)), "B") for kind in kinds)]
            for place, moment in enumerate(moments)
        ]
        peak = max(sum(moment.values()) for moment in moments)
        notes = ["One step of the first rank, from its beginning to its end, allocation by allocation."]
        near = device_bytes is not None and peak > NEAR * device_bytes
        if device_bytes is None:
            notes.append("How much the device has, the file does not say.")
        else:
            size = f"{100 * peak / device_bytes:.2g}% of the device's {device_bytes / 2**30:,.1f} GiB"
            notes.append(f"The peak is {size}{'' if near else ', which is not drawn: it is far above'}.")
        title = f"Memory by kind through the step: {label}"
        spec = _areas(rows, kinds, in_unit(device_bytes, "B") if near else None)
        yield Figure(title, spec, ["moment", *(f"{kind} MiB" for kind in kinds)], rows, notes)

    if len(shown) > MOST_PLOTS:
        yield Absent("Memory by kind through the step", f"Only the first {MOST_PLOTS} of {len(shown)} rows have plots.")


def _thinned(moments: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    stretch = -(-len(moments) // MOMENTS)
    return [
        max(moments[i : i + stretch], key=lambda moment: sum(moment.values())) for i in range(0, len(moments), stretch)
    ]


def _areas(rows: Sequence[Sequence[Cell]], kinds: Sequence[str], size: float | None) -> Spec:
    data = [
        {"moment": row[0], "kind": kind, "order": place, "MiB": amount}
        for row in rows
        for place, (kind, amount) in enumerate(zip(kinds, row[1:], strict=True))
    ]
    colors = {"domain": list(kinds), "range": [SERIES[KINDS.index(kind)] for kind in kinds]}
    layer: list[Spec] = [
        {
            "data": {"values": data},
            "mark": {"type": "area", "interpolate": "step-after"},
            "encoding": {
                "x": {
                    "field": "moment",
                    "type": "quantitative",
                    "axis": {
                        "title": "the step, from beginning to end",
                        "labels": False,
                        "ticks": False,
                        "grid": False,
                    },
                    "scale": {"nice": False},
                },
                "y": {"field": "MiB", "type": "quantitative", "stack": "zero", "axis": {"title": "MiB"}},
                "color": {
                    "field": "kind",
                    "type": "nominal",
                    "scale": colors,
                    "legend": {"title": None, "symbolType": "square"},
                },
                "order": {"field": "order", "type": "quantitative"},
            },
        }
    ]
    if size is not None:
        limit = {"data": {"values": [{"size": size, "text": "the device's memory"}]}}
        y = {"y": {"field": "size", "type": "quantitative"}}
        layer += [
            {**limit, "mark": {"type": "rule", "strokeDash": [6, 4]}, "encoding": y},
            {
                **limit,
                "mark": {"type": "text", "align": "right", "dy": -7, "x": _WIDTH},
                "encoding": {**y, "text": {"field": "text"}},
            },
        ]
    return {"width": _WIDTH, "height": _HEIGHT, "layer": layer}


CROSS = "M-1,-1L1,1M-1,1L1,-1"

_HELD = {"live": "allocated", "reserved": "reserved"}
"""What a stage has, and what PyTorch calls it."""


def by_stage(entries: Sequence[Entry]) -> Iterator[Drawn]:
    """What is allocated, and on CUDA reserved, after each stage, with the formula; nothing where no row has stages."""
    found = [each for each in entries if figure(each, "memory.stages")]
    shown = found[:MOST_LINES]
    if not shown:
        return
    stages = [figure(each, "memory.stages") for each in shown]
    names = list(dict.fromkeys(name for row in sorted(stages, key=len, reverse=True) for name in row))
    for key, word in _HELD.items():
        title = f"Memory {word} after each stage"
        data: list[dict[str, Any]] = [
            {"row": label, "stage": name.replace("_", " "), "MiB": in_unit(nbytes, "B"), "formula": formula}
            for label, held in zip(labels(shown), stages, strict=True)
            for name in names
            if (nbytes := finite(held.get(name, {}).get(key))) is not None
            for formula in [in_unit(finite(held[name].get("formula")), "B") if key == "live" else None]
        ]
        if not data:
            yield Absent(title, "CUDA's caching allocator alone reserves memory, and this run was on a CPU.")
            continue
        columns = ["row", "stage", f"{word} MiB", "formula MiB"]
        rows: list[list[Cell]] = [[each["row"], each["stage"], each["MiB"], each["formula"]] for each in data]
        notes = ["On the rank that holds most. Crosses: by the formula."] if key == "live" else []
        notes += [f"The first {len(shown)} of {len(found)} rows."] if len(found) > len(shown) else []
        yield Figure(title, _over_stages(data, [name.replace("_", " ") for name in names], word), columns, rows, notes)


def _over_stages(data: list[dict[str, Any]], names: list[str], word: str) -> Spec:
    rows = list(dict.fromkeys(each["row"] for each in data))
    colors, shapes = ({"domain": rows, "range": list(each)} for each in zip(*series(len(rows)), strict=True))
    legend = {"title": None, "columns": 2}
    x = {"field": "stage", "type": "ordinal", "sort": names, "axis": {"title": None, "labelAngle": 0}}
    encoding = {
        "x": x,
        "y": {"field": "MiB", "type": "quantitative", "axis": {"title": titled(word, "B")}},
        "color": {"field": "row", "type": "nominal", "scale": colors, "legend": legend},
        "shape": {"field": "row", "type": "nominal", "scale": shapes, "legend": legend},
    }
    formula = {**{key: encoding[key] for key in ("x", "color")}, "y": {"field": "formula", "type": "quantitative"}}
    line = {key: encoding[key] for key in ("x", "y", "color")}
    return {
        "data": {"values": data},
        "width": _WIDTH,
        "height": _HEIGHT,
        "layer": [
            {"mark": {"type": "line", "interpolate": "step-after"}, "encoding": line},
            {"mark": {"type": "point", "filled": True, "size": 55}, "encoding": encoding},
            {"mark": {"type": "point", "shape": CROSS, "color": INK, "size": 90}, "encoding": formula},
        ],
    }
