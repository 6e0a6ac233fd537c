"""The times at which each rank does what: a line for each rank, measured, and by the plan below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from shardmark.report.page.figure import MOST_PLOTS, Cell, Figure, in_unit
from shardmark.report.page.vega import BACKGROUND, SERIES, Chart, chart, color, names_axis, room
from shardmark.report.plots import labels
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.rows.row import Span

_WIDTH, _LINE, _LETTER = 640, 20, 6.5
"""Pixels of a plot, of a rank's line, and of a letter."""


def spans(entries: Sequence[Entry]) -> Figure | None:
    """A plot of the spans of each row, all on one axis of time; None where no row has any."""
    found = [each for each in entries if figure(each, "spans.measured")]
    if not found:
        return None
    shown = dict(zip(labels(found)[:MOST_PLOTS], found, strict=False))
    panels: list[tuple[str, Chart]] = []
    rows: list[list[Cell]] = []
    drawn = {
        f"{label}{how}": ranks
        for label, entry in shown.items()
        for how, ranks in (("", figure(entry, "spans.measured")), (", by its plan", figure(entry, "spans.expected")))
        if ranks
    }
    last = max(span["end"] for ranks in drawn.values() for rank in ranks for span in rank)
    every = dict.fromkeys(span["kind"] for ranks in drawn.values() for rank in ranks for span in rank)
    kinds = list(every)[: len(SERIES)]  # others have no colour of their own
    for label, ranks in drawn.items():
        panels.append(
            (f"{label}: {_share_waited(ranks):.1%} of the ranks' time is waiting", _chart(ranks, kinds, last))
        )
        rows += [
            [label, number, span["kind"], span["label"], in_unit(span["begin"], "s"), in_unit(span["end"], "s")]
            for number, rank in enumerate(ranks)
            for span in rank
        ]
    notes = ["One step of each row; the axes are the same."]
    notes += [f"The first {MOST_PLOTS} of {len(found)} rows."] if len(found) > MOST_PLOTS else []
    columns = ["row", "rank", "kind", "action", "from ms", "to ms"]
    numbered = list(enumerate(kinds))
    return Figure("What each rank does when", panels, columns, rows, notes, kinds=numbered, stacked=True)


def _share_waited(ranks: Sequence[Sequence[Span]]) -> float:
    """The share of the time to the last end in which a rank does nothing."""
    end = max(span["end"] for rank in ranks for span in rank)
    return 1 - sum(span["end"] - span["begin"] for rank in ranks for span in rank) / (len(ranks) * end)


def _chart(ranks: Sequence[Sequence[Span]], kinds: Sequence[str], last: float) -> Chart:
    names = [f"rank {number}" for number in range(len(ranks))]
    data: list[Mapping[str, Cell]] = [
        {
            "rank": names[number],
            "kind": span["kind"],
            "from": in_unit(span["begin"], "s"),
            "to": in_unit(span["end"], "s"),
            "middle": in_unit((span["begin"] + span["end"]) / 2, "s"),
            "label": span["label"],
            "fits": (span["end"] - span["begin"]) / last * _WIDTH > _LETTER * len(span["label"]),
            "tip": f"{span['label']}, {span['kind']} | {in_unit(span['begin'], 's')} to {in_unit(span['end'], 's')} ms",
        }
        for number, rank in enumerate(ranks)
        for span in rank
    ]
    scale = alt.Scale(domain=[0, in_unit(last, "s")], nice=False)
    y = names_axis("rank", names, room(names))
    x = alt.X("from:Q", scale=scale, axis=alt.Axis(title="ms", tickCount=6))
    bars = (
        chart(data)
        .mark_bar(height=_LINE - 4, stroke=BACKGROUND, strokeWidth=0.5, aria=True)
        .encode(
            x,
            alt.X2("to:Q"),
            y,
            color("kind", kinds, SERIES[: len(kinds)]).legend(None),
            alt.Description("tip:N"),
        )
    )
    texts = chart([each for each in data if each["fits"]]).mark_text(fontSize=10, color=BACKGROUND)
    layers = [bars, texts.encode(alt.X("middle:Q", scale=scale), y, alt.Text("label:N"))]
    return alt.layer(*layers).properties(width=_WIDTH, height=_LINE * len(names))
