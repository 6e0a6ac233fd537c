"""A figure: what is drawn, the same as a table, and what to say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmark.report.page.vega import Chart
from shardmark.report.plots import UNITS
from shardmark.rows.columns import Entry

MOST_ROWS = 24
"""Rows of a plot that has a line of text for each; the table has all."""

Cell = str | float | None


MOST_LINES = 12
"""Of a plot: more are told apart by nobody."""
MOST_PLOTS = 6
"""The most plots that a question shows, where each of its rows has a plot of its own."""


@dataclass(frozen=True)
class Figure:
    """One plot. `columns` and `rows` are its data, in the units that the plot has."""

    title: str
    chart: Chart
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())
    names: Sequence[str] = field(default=())
    """Of the axis for whose names the chart has stand-ins."""


@dataclass(frozen=True)
class Absent:
    """A plot that this run has no data for."""

    title: str
    reason: str


Drawn = Figure | Absent


def first(entries: Sequence[Entry], notes: list[str]) -> Sequence[Entry]:
    """As many as a plot has room for; a note says of how many."""
    if len(entries) > MOST_ROWS:
        notes.append(f"The first {MOST_ROWS} of {len(entries)} rows; the table below has all.")
    return entries[:MOST_ROWS]


def in_unit(value: float | None, unit: str) -> float | None:
    """In the unit that people read, with as many digits as anybody reads."""
    return None if value is None else float(f"{value / UNITS[unit][0]:.6g}")


def shown_as(value: Cell) -> str:
    """A number of four digits, as it stands beside its bar."""
    if not isinstance(value, float):
        return str(value)
    digits = 3 if not value else min(6, max(0, 3 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def titled(title: str, unit: str) -> str:
    """An axis's title, and its unit."""
    return f"{title}, {shown}" if (shown := UNITS[unit][1]) else title
