"""Several runs: each row's ratio to its peer and its memory over the given files, with what changed between two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from shardmark.report.changes import OPEN, Changes
from shardmark.report.page.figure import cell
from shardmark.report.plots import number
from shardmark.rows.change import BETTER
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.rows.reader import entries_of

WIDTH, HEIGHT, MARGIN = 180, 36, 7
"""Pixels of a small plot, and of the margin around its points."""


@dataclass(frozen=True)
class Mark:
    """One run's point of a small plot, in pixels; `change` is "better", "worse" or empty."""

    x: float
    y: float
    change: str
    tip: str


@dataclass(frozen=True)
class Trace:
    """A figure over the runs: the path of its interval's band, that of its line, and its points."""

    band: str
    line: str
    marks: Sequence[Mark]
    one: float | None
    """Where the peer's 1 is; None if it is not between the ends."""
    said: str
    """First and last figure as text."""


@dataclass(frozen=True)
class Past:
    """A row's history."""

    name: str
    ratio: Trace | None
    memory: Trace | None
    """None if its bytes are the same in all runs."""
    changed: Sequence[str]
    """One line for each change between two runs."""


def history(runs: Sequence[tuple[str, Entry]], steps: Sequence[Changes]) -> list[Past]:
    """Rows of the last run that an earlier one has too, those that changed first.

    `steps` are the changes of each run but the first since the one before it.
    """
    found = [{entry["fullname"]: entry for entry in entries_of(run)} for _, run in runs]
    names = [name for name, _ in runs]
    changed: dict[str, list[tuple[int, str, str, str]]] = {}
    for place, step in enumerate(steps, start=1):
        for outcome, test, kind, said in step.rows:
            if outcome != OPEN:
                changed.setdefault(test, []).append((place, kind, "better" if outcome == BETTER else "worse", said))
    pasts = []
    for test, entry in found[-1].items():
        rows = [each.get(test) for each in found]
        if sum(row is not None for row in rows) > 1:
            mine = changed.get(test, [])
            marked = {kind: {place: how for place, of, how, _ in mine if of == kind} for kind in ("time", "memory")}
            row = entry["extra_info"]
            pasts.append(
                Past(
                    f"{row['implementation']} · {row['case']['id']}",
                    _trace(
                        names,
                        [_ratio(each) for each in rows],
                        _said(rows, "ratio to peer", ""),
                        marked["time"],
                        [_peer(each) for each in rows],
                    ),
                    _memory(names, rows, marked["memory"]),
                    [f"{names[place]}: {kind} {said}" for place, kind, _, said in mine],
                )
            )
    return sorted(pasts, key=lambda past: not past.changed)


def _memory(names: Sequence[str], rows: Sequence[Entry | None], changes: dict[int, str]) -> Trace | None:
    """The tensors at the peak; None if they are the same bytes in all runs."""
    known = [None if row is None else number(row, "memory.tensors") for row in rows]
    if len({each for each in known if each is not None}) < 2:
        return None
    spans = [None if each is None else (each, each, each) for each in known]
    return _trace(names, spans, _said(rows, "tensors MiB", " MiB"), changes)


def _peer(entry: Entry | None) -> str:
    return "" if entry is None else str(figure(entry, "time.peer") or "")


def _ratio(entry: Entry | None) -> tuple[float, float, float] | None:
    """A row's ratio to its peer and its interval; without an interval, the ratio alone."""
    ratio = None if entry is None else number(entry, "time.ratio")
    if entry is None or not ratio:
        return None
    low, high = figure(entry, "time.interval") or (ratio, ratio)
    return low, ratio, high


def _said(rows: Sequence[Entry | None], column: str, unit: str) -> list[str]:
    texts = ["" if row is None else cell(column, row) for row in rows]
    return [f"{text}{unit}" if text else "" for text in texts]


def _trace(
    names: Sequence[str],
    spans: Sequence[tuple[float, float, float] | None],
    texts: Sequence[str],
    changes: dict[int, str],
    peers: Sequence[str] = (),
) -> Trace | None:
    """A figure's small plot, on a logarithmic axis of its own; None for fewer than two points.

    Ratios to two peers do not compare: the line breaks where the peer changes.
    """
    known = [(place, span) for place, span in enumerate(spans) if span is not None and span[0] > 0]
    if len(known) < 2:
        return None
    middles = [span[1] for _, span in known]
    low = max(min(span[0] for _, span in known), min(middles) / 3)
    high = min(max(span[2] for _, span in known), max(middles) * 3)
    low, high = (low / 1.02, high * 1.02) if high < 1.02 * low else (low, high)

    def x(place: int) -> float:
        return round(MARGIN + (WIDTH - 2 * MARGIN) * place / (len(spans) - 1), 1)

    def y(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share, 1)

    marks = [
        Mark(x(place), y(span[1]), changes.get(place, ""), f"{names[place]} | {texts[place]}") for place, span in known
    ]
    band, line = "", ""
    for _, group in groupby(known, key=lambda each: peers[each[0]] if peers else ""):
        same = list(group)
        upper = [f"{x(place)},{y(span[2])}" for place, span in same]
        lower = [f"{x(place)},{y(span[0])}" for place, span in reversed(same)]
        band += f"M{'L'.join([*upper, *lower])}Z"
        line += f"M{'L'.join(f'{x(place)},{y(span[1])}' for place, span in same)}"
    said = f"{texts[known[0][0]]} → {texts[known[-1][0]]}"
    return Trace(band, line, marks, y(1.0) if low < 1 < high else None, said)
