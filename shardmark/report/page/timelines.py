"""Memory by kind through a step, against the device's size; and after each stage of making a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from shardmark.meter.timeline import KINDS
from shardmark.report.page.figure import MOST_LINES, MOST_PLOTS, Absent, Cell, Drawn, Figure, in_unit, titled
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, series
from shardmark.report.plots import finite, labels
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure

MOMENTS = 100
"""Moments of a step that are drawn, each the largest of a stretch; the row has up to 200."""
NEAR = 0.2
"""Share of the device's memory from which its size is drawn; for a smaller peak it would flatten the plot."""
_WIDTH, _HEIGHT = 560, 220


def by_kind(entries: Sequence[Entry], device_bytes: float | None) -> Iterator[Drawn]:
    """Memory of a step by kind as stacked areas, for each row that has it."""
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
            notes.append("The file does not say how much memory the device has.")
        else:
            size = f"{100 * peak / device_bytes:.2g}% of the device's {device_bytes / 2**30:,.1f} GiB"
            notes.append(f"The peak is {size}{'' if near else ', which is not drawn: it is far above'}.")
        title = f"Memory by kind through the step: {label}"
        areas = _areas(rows, kinds, in_unit(device_bytes, "B") if near else None)
        yield Figure(title, areas, ["moment", *(f"{kind} MiB" for kind in kinds)], rows, notes)

    if len(shown) > MOST_PLOTS:
        yield Absent("Memory by kind through the step", f"Only the first {MOST_PLOTS} of {len(shown)} rows have plots.")


def _thinned(moments: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    stretch = -(-len(moments) // MOMENTS)
    return [
        max(moments[i : i + stretch], key=lambda moment: sum(moment.values())) for i in range(0, len(moments), stretch)
    ]


def _areas(rows: Sequence[Sequence[Cell]], kinds: Sequence[str], size: float | None) -> Chart:
    data = [
        {"moment": row[0], "kind": kind, "order": place, "MiB": amount}
        for row in rows
        for place, (kind, amount) in enumerate(zip(kinds, row[1:], strict=True))
    ]
    x_axis = alt.Axis(title="the step, from beginning to end", labels=False, ticks=False, grid=False)
    areas = (
        chart(data)
        .mark_area(interpolate="step-after")
        .encode(
            alt.X("moment:Q", axis=x_axis, scale=alt.Scale(nice=False)),
            alt.Y("MiB:Q", stack="zero", axis=alt.Axis(title="MiB")),
            color("kind", kinds, [SERIES[KINDS.index(kind)] for kind in kinds], symbolType="square"),
            alt.Order("order:Q"),
        )
    )
    layers = [areas]
    if size is not None:
        limit = chart([{"size": size, "text": "the device's memory"}]).encode(alt.Y("size:Q"))
        layers.append(limit.mark_rule(strokeDash=[6, 4]))
        layers.append(limit.mark_text(align="right", dy=-7, x=_WIDTH).encode(alt.Text("text:N")))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


CROSS = "M-1,-1L1,1M-1,1L1,-1"

_HELD = {"live": "allocated", "reserved": "reserved"}
"""Key in a row's stages, and PyTorch's word for it."""


def by_stage(entries: Sequence[Entry]) -> Iterator[Drawn]:
    """Memory allocated, and on CUDA reserved, after each stage, with the formula; nothing if no row has stages."""
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
            yield Absent(title, "Only CUDA's caching allocator reserves memory, and this run was on a CPU.")
            continue
        columns = ["row", "stage", f"{word} MiB", "formula MiB"]
        rows: list[list[Cell]] = [[each["row"], each["stage"], each["MiB"], each["formula"]] for each in data]
        notes = ["On the rank that holds most. Crosses: by the formula."] if key == "live" else []
        notes += [f"The first {len(shown)} of {len(found)} rows."] if len(found) > len(shown) else []
        yield Figure(title, _over_stages(data, [name.replace("_", " ") for name in names], word), columns, rows, notes)


def _over_stages(data: list[dict[str, Any]], names: list[str], word: str) -> Chart:
    rows = list(dict.fromkeys(each["row"] for each in data))
    colors, shapes = map(list, zip(*series(len(rows)), strict=True))
    legend = alt.Legend(title=None, columns=2)
    base = chart(data).encode(
        alt.X("stage:O", sort=names, axis=alt.Axis(title=None, labelAngle=0)),
        alt.Y("MiB:Q", axis=alt.Axis(title=titled(word, "B"))),
        color("row", rows, colors, columns=2),
    )
    lines = base.mark_line(interpolate="step-after")
    points = base.mark_point(filled=True, size=55).encode(
        alt.Shape("row:N", scale=alt.Scale(domain=rows, range=shapes), legend=legend)
    )
    crosses = base.mark_point(shape=CROSS, color=INK, size=90).encode(alt.Y("formula:Q"))
    return alt.layer(lines, points, crosses).properties(width=_WIDTH, height=_HEIGHT)
