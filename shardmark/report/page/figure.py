"""Plots of the page: points and bars in HTML, which wrap on a phone, and lines and areas by Vega-Lite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardmark.report.page.vega import Chart
from shardmark.report.plots import UNITS, labels, tokens
from shardmark.rows.columns import COLUMNS, Entry

MOST_ROWS = 24
"""Most rows of a plot that labels each; the table has all."""

Cell = str | float | None


MOST_LINES = 12
"""Most lines of a plot: nobody tells more apart."""
MOST_PLOTS = 6
"""Most plots of a question whose rows have a plot each."""


@dataclass(frozen=True)
class Figure:
    """A plot by Vega-Lite, in one or several panels; `columns` and `rows` are its data, in the plot's units."""

    title: str
    panels: Sequence[tuple[str, Chart]]
    """(heading, chart) of each."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())
    names: Sequence[str] = field(default=())
    """Names of the axis whose stand-ins are in the chart."""
    kinds: Sequence[tuple[int, str]] = field(default=())
    """(colour's number, name) of what the panels' areas are."""
    stacked: bool = False
    """Whether the panels share their axes, one above the other."""


@dataclass(frozen=True)
class Dot:
    """A row as a point with its interval, as places on the axis in percent."""

    name: str
    anchor: str
    """The id of the row in the table."""
    kind: str
    """"peer", "raced", "apart" (not timed in turns with the peer) or "alone" (no ratio)."""
    at: float
    ends: tuple[float, float] | None
    figures: tuple[str, str]
    """Ratio and time, as in the table."""
    tip: str


@dataclass(frozen=True)
class Dots:
    """Rows as points on one logarithmic axis, by case; `one` is the place of the peer, if there is one."""

    title: str
    groups: Sequence[tuple[str, Sequence[Dot]]]
    ticks: Sequence[tuple[float, str]]
    """(place in percent, text)."""
    one: float | None
    axis: str
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Bar:
    """A row as a stacked bar: (kind's number, percent of the group's longest) of each part."""

    name: str
    anchor: str
    parts: Sequence[tuple[int, float]]
    tick: float | None
    figures: str
    tip: str


@dataclass(frozen=True)
class Bars:
    """Rows as stacked bars, by case; `kinds` are (colour's number, name) of the parts, `tick` the tick's name."""

    title: str
    kinds: Sequence[tuple[int, str]]
    groups: Sequence[tuple[str, Sequence[Bar]]]
    tick: str = ""
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Absent:
    """A plot for which this run has no data, and why."""

    title: str
    reason: str


Drawn = Figure | Dots | Bars | Absent


class Anchors:
    """Ids of the page's elements, each of one element: `row-...`, `plot-...`, `question-...`."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def __call__(self, kind: str, *names: str) -> str:
        """A new id that says what it names; an id that is taken gets a number."""
        words = re.sub(r"[^a-z0-9_.]+", "-", "-".join(names).lower()).strip("-")
        found = f"{kind}-{words[:120]}"
        self._taken[found] = count = self._taken.get(found, 0) + 1
        return found if count == 1 else f"{found}--{count}"


def cell(name: str, entry: Entry) -> str:
    """The text of a row in that column of the tables; empty if there is none."""
    return COLUMNS[name].cell(entry, entry["extra_info"]) or ""


def tip(entry: Entry) -> str:
    """A row's figures in one line, as its table has them: shown on hover and focus."""
    row = entry["extra_info"]
    parts = [
        f"{row['implementation']} · {row['case']['id']}",
        f"{time} ms" if (time := cell("time ms", entry)) else "",
        f"ratio {ratio}" if (ratio := cell("ratio to peer", entry)) else "",
        f"{memory} MiB" if (memory := cell("tensors MiB", entry)) else "",
        f"budget {budget} MiB" if (budget := cell("budget MiB", entry)) else "",
    ]
    return " | ".join(filter(None, parts))


def first(entries: Sequence[Entry], notes: list[str]) -> Sequence[Entry]:
    """As many entries as a plot has room for; if some are left out, append a note that says so."""
    if len(entries) > MOST_ROWS:
        notes.append(f"The first {MOST_ROWS} of {len(entries)} rows; the table below has all.")
    return entries[:MOST_ROWS]


def by_case(entries: Sequence[Entry]) -> list[tuple[str, list[tuple[str, Entry]]]]:
    """(heading, [(name, entry), ...]) of each case and world size, in their order.

    A heading has what not all cases share; a case's id is read without its implementation's name, which some ids
    contain. If each case has one row, all are in one group, and the names tell the cases.
    """
    found: dict[tuple[tuple[str, ...], int], list[Entry]] = {}
    for entry in entries:
        found.setdefault((tuple(tokens(entry)), entry["extra_info"]["world_size"]), []).append(entry)
    if len(found) == len(entries) > 1:
        return [("", [*zip(labels(entries), entries, strict=True)])]
    shared = set.intersection(*(set(parts) for parts, _ in found)) if len(found) > 1 else set()
    several = len({ranks for _, ranks in found}) > 1
    return [
        (
            " ".join([*(each for each in parts if each not in shared), *([f"on {ranks} ranks"] if several else [])]),
            [(entry["extra_info"]["implementation"], entry) for entry in same],
        )
        for (parts, ranks), same in found.items()
    ]


def in_unit(value: float | None, unit: str) -> float | None:
    """Convert from the row's unit to the one that people read, in six digits."""
    return None if value is None else float(f"{value / UNITS[unit][0]:.6g}")


def shown_as(value: Cell) -> str:
    """A number in four digits, as text beside its bar."""
    if not isinstance(value, float):
        return str(value)
    digits = 3 if not value else min(6, max(0, 3 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def titled(title: str, unit: str) -> str:
    """An axis's title with its unit, as in "time, ms"."""
    return f"{title}, {shown}" if (shown := UNITS[unit][1]) else title


def ticks(values: Iterable[float]) -> list[float]:
    """Ticks of a logarithmic axis between its ends.

    Powers of ten; over fewer than three of them, also 2 and 5 times each; over less than a factor of four, equal steps.
    """
    known = [value for value in values if value > 0]
    low, high = min(known), max(known)
    if high < 4 * low:
        rough = (high - low or high) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
        found = [round(n * step, 12) for n in range(math.floor(low / step), math.ceil(high / step) + 1) if n]
    else:
        start, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if last - start < 3 else (1,)
        found = [step * 10.0**power for power in range(start, last + 1) for step in steps]
    return [each for each in found if low <= each <= high]
