"""What was predicted: which stream is busy when, and times beside those of a run that measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from shardmark.report.page.figure import MOST_PLOTS, Absent, Cell, Drawn, Figure, first, in_unit
from shardmark.report.page.vega import INK, SERIES, Chart, chart, color, names_axis, room, stand_ins
from shardmark.report.plots import labels
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of
from shardmark.rows.row import figure
from shardmark.text import ms

_WIDTH = 500
WIDE = 0.12
"""Of the step: narrower parts have no room for their names."""


def streams(entries: Sequence[Entry]) -> Iterator[Drawn]:
    """For each predicted row, when each stream of the first rank's device is busy, and where the step's parts end."""
    shown = [each for each in entries if figure(each, "time.predicted.streams")]
    title = "The predicted step, stream by stream"
    for label, entry in zip(labels(shown), shown[:MOST_PLOTS], strict=False):
        busy = figure(entry, "time.predicted.streams")
        rows: list[list[Cell]] = [
            [name, in_unit(begin, "s"), in_unit(end, "s")] for name, lane in busy.items() for begin, end in lane
        ]
        notes = [f"{_ms(figure(entry, 'stats.mean'))}. Short gaps are not drawn."]
        if interval := _interval(entry):
            between = " and ".join(map(_ms, interval))
            notes.insert(
                0, f"9 of 10 steps: between {between}; at least {_ms(figure(entry, 'time.predicted.at_least'))}."
            )
        ends = _ends(figure(entry, "time.parts"))
        columns = ["stream", "from ms", "to ms"]
        yield Figure(f"{title}: {label}", _lanes(rows, list(busy), ends), columns, rows, notes, list(busy))
    if len(shown) > MOST_PLOTS:
        yield Absent(title, f"Only the first {MOST_PLOTS} of {len(shown)} rows have plots.")


def _ends(parts: dict[str, float]) -> list[dict[str, Any]]:
    """When each part is over, and its name where there is room."""
    over, ends = 0.0, []
    for name, seconds in parts.items():
        over += seconds
        shown = name if seconds > WIDE * sum(parts.values()) else ""
        ends.append({"part": shown, "ms": in_unit(over, "s")})
    return ends


def _lanes(rows: Sequence[Sequence[Cell]], names: Sequence[str], ends: list[dict[str, Any]]) -> Chart:
    shorts = stand_ins(names)
    data = [{"stream": shorts[str(name)], "from": begin, "to": end} for name, begin, end in rows]
    order = list(shorts.values())
    nice, axis = alt.Scale(nice=False), alt.Axis(title="ms")
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


def is_predicted(run: Entry) -> bool:
    """Whether a run's rows are of a simulation."""
    return any(entry["extra_info"].get("simulated") for entry in entries_of(run))


def beside(predicted: Entry, measured: Entry) -> Figure | None:
    """Predicted times with their intervals, beside the measured ones of the same tests; None where there are none."""
    means = {entry["fullname"]: entry["stats"]["mean"] for entry in measured["benchmarks"]}
    found = [
        entry for entry in predicted["benchmarks"] if entry["fullname"] in means and figure(entry, "time.predicted")
    ]
    if not found:
        return None
    notes = ["Bars: between which 9 of 10 steps are predicted to be. The error is the predicted time's."]
    names = [entry["fullname"].partition("::")[2] or entry["fullname"] for entry in found]
    rows: list[list[Cell]] = []
    for name, entry in zip(names, found, strict=True):
        mean, own = entry["stats"]["mean"], means[entry["fullname"]]
        seconds = (in_unit(each, "s") for each in (mean, *(_interval(entry) or (mean, mean)), own))
        rows.append([name, *seconds, f"{100 * (mean / own - 1):+.1f}%"])
    columns = ["test", "predicted ms", "from", "to", "measured ms", "error"]
    shown = list(first([dict(zip(columns, row, strict=True)) for row in rows], notes))
    return Figure("Predicted beside measured", _beside(shown), columns, rows, notes, names)


def _ms(seconds: float) -> str:
    return f"{ms(seconds)} ms"


def _interval(entry: Entry) -> Sequence[float]:
    return figure(entry, "time.predicted.interval") or ()


def _beside(shown: Sequence[Entry]) -> Chart:
    shorts = stand_ins([each["test"] for each in shown])
    kinds = ["predicted", "measured"]
    data = [
        {"test": shorts[each["test"]], "time": kind, "ms": each[f"{kind} ms"], "from": each["from"], "to": each["to"]}
        for each in shown
        for kind in kinds
    ]
    scale, axis = alt.Scale(type="log"), alt.Axis(title="ms")
    names = [each["test"] for each in shown]
    base = chart(data).encode(names_axis("test", [shorts[name] for name in names], room(names)))
    shape = alt.Scale(domain=kinds, range=["diamond", "circle"])
    intervals = base.mark_rule().encode(alt.X("from:Q", scale=scale, axis=axis), alt.X2("to"))
    points = base.mark_point(filled=True, size=60).encode(
        alt.X("ms:Q", scale=scale, axis=axis),
        color("time", kinds, [INK, SERIES[0]]),
        alt.Shape("time:N", scale=shape, legend=alt.Legend(title=None)),
    )
    return alt.layer(intervals, points).properties(width=420, height=alt.Step(20))
