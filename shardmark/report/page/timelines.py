"""Memory by kind through a step: the rows one above the other, on one pair of axes, beside the device's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from shardmark.meter.timeline import KINDS
from shardmark.report.page.figure import MOST_PLOTS, Cell, Figure, in_unit
from shardmark.report.page.vega import SERIES, Chart, chart, color
from shardmark.report.plots import finite, labels
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.text import mib

MOMENTS = 100
"""Moments of a step that are drawn, each the largest of a stretch; the row has up to 200."""
NEAR = 0.2
"""Share of the device's memory from which its size is drawn; for a smaller peak it would flatten the plot."""
_WIDTH, _HEIGHT = 480, 130


def by_kind(entries: Sequence[Entry], device_bytes: float | None) -> Figure | None:
    """Memory of a step by kind as stacked areas, for each row that has it; None if no row does."""
    found = [each for each in entries if figure(each, "memory.curve")]
    if not found:
        return None
    shown = dict(zip(labels(found)[:MOST_PLOTS], found, strict=False))
    curves = {label: _thinned(figure(entry, "memory.curve")) for label, entry in shown.items()}
    peak = max(sum(moment.values()) for moments in curves.values() for moment in moments)
    kinds = [kind for kind in KINDS if any(moment.get(kind) for moments in curves.values() for moment in moments)]
    notes = [
        "One step of the first rank, allocation by allocation, from its beginning to its end; the axes are the same."
    ]
    notes += [f"The first {MOST_PLOTS} of {len(found)} rows."] if len(found) > MOST_PLOTS else []
    near = device_bytes is not None and peak > NEAR * device_bytes
    if device_bytes is None:
        notes.append("The file does not say how much memory the device has.")
    else:
        size = f"{100 * peak / device_bytes:.2g}% of the device's {device_bytes / 2**30:,.1f} GiB"
        notes.append(f"The largest peak is {size}{'' if near else ', which is not drawn: it is far above'}.")
    rows: list[list[Cell]] = [
        [label, place, *(in_unit(finite(moment.get(kind, 0)), "B") for kind in kinds)]
        for label, moments in curves.items()
        for place, moment in enumerate(moments)
    ]
    top = max(peak, device_bytes or 0.0) if near else peak
    panels = [
        (
            f"{label}: {mib(max(sum(moment.values()) for moment in moments))} MiB at the peak",
            _areas(moments, kinds, top, device_bytes if near else None),
        )
        for label, moments in curves.items()
    ]
    columns = ["row", "moment", *(f"{kind} MiB" for kind in kinds)]
    numbered = [(KINDS.index(kind), kind) for kind in kinds]
    title = "Memory by kind through the step"
    return Figure(title, panels, columns, rows, notes, kinds=numbered, stacked=True)


def _thinned(moments: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    stretch = -(-len(moments) // MOMENTS)
    return [
        max(moments[i : i + stretch], key=lambda moment: sum(moment.values())) for i in range(0, len(moments), stretch)
    ]


def _areas(moments: Sequence[Mapping[str, float]], kinds: Sequence[str], top: float, size: float | None) -> Chart:
    """One row's areas on an axis up to `top` bytes, and its peak as a point."""
    data = [
        {
            "moment": place / max(1, len(moments) - 1),
            "kind": kind,
            "order": order,
            "MiB": in_unit(moment.get(kind, 0), "B"),
        }
        for place, moment in enumerate(moments)
        for order, kind in enumerate(kinds)
    ]
    y = alt.Y("MiB:Q", stack="zero", axis=alt.Axis(title="MiB", tickCount=4, minExtent=45))
    y = y.scale(domain=[0, in_unit(top, "B")], nice=False)
    colours = color("kind", kinds, [SERIES[KINDS.index(kind)] for kind in kinds]).legend(None)
    areas = (
        chart(data)
        .mark_area(interpolate="step-after")
        .encode(
            alt.X(
                "moment:Q",
                axis=alt.Axis(title=None, labels=False, ticks=False, grid=False),
                scale=alt.Scale(nice=False),
            ),
            y,
            colours,
            alt.Order("order:Q"),
        )
    )
    highest = max(range(len(moments)), key=lambda place: sum(moments[place].values()))
    said = " | ".join(f"{kind} {mib(moments[highest][kind])} MiB" for kind in kinds if moments[highest].get(kind))
    whole = in_unit(sum(moments[highest].values()), "B")
    peak = chart([{"moment": highest / max(1, len(moments) - 1), "MiB": whole, "tip": f"peak | {said}"}])
    point = peak.mark_point(filled=True, size=45, color="var(--ink)", aria=True)
    layers = [areas, point.encode(alt.X("moment:Q"), alt.Y("MiB:Q"), alt.Description("tip:N"))]
    if size is not None:
        limit = chart([{"size": in_unit(size, "B"), "text": "the device's memory"}]).encode(alt.Y("size:Q"))
        layers.append(limit.mark_rule(strokeDash=[6, 4]))
        layers.append(limit.mark_text(align="right", dy=-7, x=_WIDTH).encode(alt.Text("text:N")))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)
