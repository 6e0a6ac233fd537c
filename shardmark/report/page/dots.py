"""Times of a question's rows as points on one logarithmic axis: as ratios to the peer's, or in ms without races."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardmark.report.page.figure import MOST_ROWS, Dot, Dots, by_case, cell, in_unit, shown_as, ticks, tip
from shardmark.report.plots import number
from shardmark.report.ranking import Span, Who, peer_of, relative_times, who
from shardmark.rows.columns import COLUMNS, Entry

BEYOND = 3.0
"""Factor beyond the outermost points at which intervals are cut: a few rounds give intervals of any width."""

Placed = tuple[Entry | None, str, str, Span]
"""(entry, name, kind, figure) of a point; no entry is a peer without a row of its own."""


def times(entries: Sequence[Entry], anchors: Mapping[str, str]) -> Dots | None:
    """Ratios to the peer, sorted within each case; without races, times. None for fewer than two points.

    `anchors` are the ids of the rows by test.
    """
    timed = [entry for entry in entries if number(entry, "stats.median")]
    cases = by_case(timed)
    groups = [
        (f"{heading} · 1 is {peer[1]}".removeprefix(" · "), _raced(same, peer))
        for heading, named in cases
        for same in [[entry for _, entry in named]]
        if (peer := peer_of(same))
    ]
    title, axis = "Time beside the peer's", "time / peer's time"
    notes = ["Left of the line is faster. Bar: 95% interval of the ratio, from pairs of steps that took turns."]
    alone = len(timed) - sum(entry is not None for _, group in groups for entry, *_ in group)
    if alone and groups:
        notes.append(f"{alone} {'row has' if alone == 1 else 'rows have'} no peer: see the table.")
    if any(kind == "apart" for _, group in groups for _, _, kind, _ in group):
        notes.append("Hollow: not timed in turns with the peer, so the quotient of two times without an interval.")
    if not groups:
        groups = [(heading, [_timed(name, entry) for name, entry in named]) for heading, named in cases]
        title, axis = "Time", "ms"
        notes = ["Bar: from the first to the third quartile of the rounds."]
    groups = _first(groups, notes)
    spans = [span for _, group in groups for *_, span in group]
    if len(spans) < 2:
        return None
    scale = Scale.around(spans)
    if any(span.low < scale.low or span.high > scale.high for span in spans if span.low > 0 and span.high < math.inf):
        notes.append("An interval that reaches the edge goes on beyond it.")
    shown = [
        (heading, [_dot(each, scale, anchors) for each in sorted(group, key=lambda each: each[3].mid)])
        for heading, group in groups
    ]
    marks = [(scale.place(each), f"{each:g}") for each in ticks((scale.low, scale.high))]
    return Dots(title, shown, marks, scale.place(1.0) if axis != "ms" else None, axis, notes)


def _first(groups: list[tuple[str, list[Placed]]], notes: list[str]) -> list[tuple[str, list[Placed]]]:
    """As many cases as a plot has room for, and at least one."""
    shown: list[tuple[str, list[Placed]]] = []
    for each in groups:
        if shown and sum(len(group) for _, group in (*shown, each)) > 1.5 * MOST_ROWS:
            notes.append(f"The first {len(shown)} of {len(groups)} cases; the table has all.")
            break
        shown.append((each[0], each[1][: 2 * MOST_ROWS]))
    return shown


def _raced(same: Sequence[Entry], peer: Who) -> list[Placed]:
    """The rows of a case as ratios to the common peer; a row's own ratio where it was timed in turns with that peer."""
    found: list[Placed] = []
    chained = relative_times(same, peer)
    raced = {who(entry) for entry in same if number(entry, "time.ratio") is not None}
    for entry in same:
        time, span = entry["extra_info"]["time"], chained.get(who(entry))
        if who(entry) == peer:
            found.append((entry, peer[1], "peer", Span(1.0, 1.0, 1.0)))
        elif time.get("ratio") is not None and time["peer"] == peer[1]:
            low, high = time["interval"] or (0.0, math.inf)
            found.append((entry, who(entry)[1], "raced", Span(low, time["ratio"], high)))
        elif span is not None:
            found.append((entry, who(entry)[1], "raced" if who(entry) in raced else "apart", span))
    if all(kind != "peer" for _, _, kind, _ in found):
        found.append((None, peer[1], "peer", Span(1.0, 1.0, 1.0)))
    return found


def _timed(name: str, entry: Entry) -> Placed:
    low, mid, high = (in_unit(number(entry, f"stats.{each}"), "s") or 0.0 for each in ("q1", "median", "q3"))
    return entry, name, "alone", Span(low, mid, high)


class Scale:
    """A logarithmic axis from `low` to `high`; places are in percent."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    @classmethod
    def around(cls, spans: Sequence[Span]) -> Scale:
        """An axis with room for all points, and for intervals that are not far beyond them."""
        mids = [span.mid for span in spans]
        low, high = min(mids), max(mids)
        ends = [end for span in spans for end in (span.low, span.high) if 0 < end < math.inf]
        low, high = max(low / BEYOND, min([low, *ends])), min(high * BEYOND, max([high, *ends]))
        margin = 1.05 * (high / low) ** 0.02
        return cls(low / margin, high * margin)

    def place(self, value: float) -> float:
        """A figure's place on the axis; one beyond it is at its end."""
        within = min(max(value, self.low), self.high)
        return round(100 * math.log(within / self.low) / math.log(self.high / self.low), 3)


def _dot(placed: Placed, scale: Scale, anchors: Mapping[str, str]) -> Dot:
    entry, name, kind, span = placed
    known = kind not in ("peer", "apart") and span.low > 0 and span.high < math.inf
    ends = (scale.place(span.low), scale.place(span.high)) if known else None
    if entry is None:
        return Dot(name, "", kind, scale.place(1.0), None, ("", ""), f"{name}: the peer, without a row of its own")
    time = COLUMNS["time ms"].brief
    median = (time and time(entry, entry["extra_info"])) or ""
    ratio = cell("ratio to peer", entry) if kind == "raced" else ""
    if kind == "apart":
        ratio = f"{shown_as(float(f'{span.mid:.3g}'))}, not in turns"
    return Dot(name, anchors[entry["fullname"]], kind, scale.place(span.mid), ends, (ratio, f"{median} ms"), tip(entry))
