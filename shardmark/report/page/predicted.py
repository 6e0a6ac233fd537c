"""Predicted rows: which stream is busy when, and which strategies fit on the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from shardmark.report.page.figure import MOST_PLOTS, Cell, Figure, in_unit
from shardmark.report.page.vega import SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.report.plots import labels
from shardmark.report.ranking import has_several, who
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.text import mib, ms

_WIDTH = 500
COLUMNS = ("strategy", "ranks", "step ms", "tensors MiB", "reserved MiB", "free MiB", "fits")

WIDE = 0.12
"""Share of the step below which a part has no room for its name."""


def streams(entries: Sequence[Entry]) -> Figure | None:
    """When each stream of the first rank's device is busy, and when the step's parts end: the predicted rows one above
    the other, on one axis. None if no row is predicted."""
    found = [each for each in entries if figure(each, "time.predicted.streams")]
    if not found:
        return None
    shown = dict(zip(labels(found)[:MOST_PLOTS], found, strict=False))
    notes = ["All rows have the same axis. Short gaps are not drawn."]
    notes += [f"The first {MOST_PLOTS} of {len(found)} rows."] if len(found) > MOST_PLOTS else []
    rows: list[list[Cell]] = []
    panels: list[tuple[str, Chart]] = []
    busy = {label: figure(entry, "time.predicted.streams") for label, entry in shown.items()}
    last = max(end for streams in busy.values() for lane in streams.values() for _, end in lane)
    names = list(dict.fromkeys(name for streams in busy.values() for name in streams))
    for label, entry in shown.items():
        lanes: list[list[Cell]] = [
            [name, in_unit(begin, "s"), in_unit(end, "s")] for name, lane in busy[label].items() for begin, end in lane
        ]
        rows += [[label, *lane] for lane in lanes]
        panels.append((f"{label}: {_said(entry)}", _lanes(lanes, names, _ends(figure(entry, "time.parts")), last)))
    columns = ["row", "stream", "from ms", "to ms"]
    return Figure("The predicted step, stream by stream", panels, columns, rows, notes, names, stacked=True)


def _said(entry: Entry) -> str:
    """The predicted step, in ms, with its interval."""
    text = _ms(figure(entry, "stats.median"))
    if interval := predicted_interval(entry):
        between = " and ".join(map(_ms, interval))
        text += f"; 9 of 10 steps between {between}, at least {_ms(figure(entry, 'time.predicted.at_least'))}"
    return text


def _ends(parts: dict[str, float]) -> list[dict[str, Any]]:
    """The time at which each part ends, and its name if there is room."""
    over, ends = 0.0, []
    for name, seconds in parts.items():
        over += seconds
        shown = name if seconds > WIDE * sum(parts.values()) else ""
        ends.append({"part": shown, "ms": in_unit(over, "s")})
    return ends


def _lanes(rows: Sequence[Sequence[Cell]], names: Sequence[str], ends: list[dict[str, Any]], last: float) -> Chart:
    """One row's streams on an axis up to `last` seconds."""
    shorts = stand_ins(names)
    data = [{"stream": shorts[str(name)], "from": begin, "to": end} for name, begin, end in rows]
    order = list(shorts.values())
    nice, axis = alt.Scale(nice=False, domain=[0, in_unit(last, "s")]), alt.Axis(title="ms")
    busy = (
        chart(data)
        .mark_bar(height=16)
        .encode(
            alt.X("from:Q", axis=axis, scale=nice),
            alt.X2("to"),
            names_axis("stream", order, room(names)),
            color("stream", order, [SERIES[i % len(SERIES)] for i in range(len(order))]).legend(None),
        )
    )
    over = chart(ends).encode(alt.X("ms:Q", axis=axis, scale=nice))
    labels_ = over.mark_text(align="right", dx=-4, y=-6).encode(alt.Text("part:N"))
    return alt.layer(busy, over.mark_rule(strokeDash=[4, 4]), labels_).properties(width=_WIDTH, height=alt.Step(26))


def _ms(seconds: float) -> str:
    return f"{ms(seconds)} ms"


def predicted_interval(entry: Entry) -> Sequence[float]:
    return figure(entry, "time.predicted.interval") or ()


@dataclass(frozen=True)
class Fits:
    """The strategies predicted for one case on one hardware."""

    title: str
    rows: list[list[str]]
    """First what fits, fastest first; then what does not."""


def strategies(entries: Sequence[Entry]) -> list[Fits]:
    """A table for each case with several predicted implementations, where the device's memory is known."""
    cases: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if figure(entry, "memory.available") is not None and figure(entry, "memory.reserved") is not None:
            row = entry["extra_info"]
            cases.setdefault((row["case"]["id"], row["world_size"]), []).append(entry)
    found = []
    for (case, ranks), same in cases.items():
        if has_several(same):
            title = f"{case} on {ranks} x {same[0]['extra_info']['hardware']}"
            found.append(Fits(title, [_cells(entry) for entry in sorted(same, key=_place)]))
    return found


def _free(entry: Entry) -> int:
    free: int = figure(entry, "memory.available") - figure(entry, "memory.reserved")
    return free


def _place(entry: Entry) -> tuple[bool, bool, float]:
    seconds = figure(entry, "stats.median") if entry["stats"] else None
    return _free(entry) < 0, seconds is None, seconds or 0.0


def _cells(entry: Entry) -> list[str]:
    row, free = entry["extra_info"], _free(entry)
    return [
        "=".join(who(entry)),
        str(row["world_size"]),
        ms(entry["stats"]["median"]) if entry["stats"] else "",
        mib(row["memory"]["tensors"]),
        mib(row["memory"]["reserved"]),
        mib(free),
        "no" if free < 0 else "yes",
    ]
