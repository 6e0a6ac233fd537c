"""A figure of the page: its chart, the same data as a table, and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmark.report.page.vega import Chart
from shardmark.report.plots import UNITS
from shardmark.rows.columns import Entry

MOST_ROWS = 24
"""Most rows of a plot that labels each; the table has all."""

Cell = str | float | None


MOST_LINES = 12
"""Most lines of a plot: nobody tells more apart."""
MOST_PLOTS = 6
"""Most plots of a question whose rows have a plot each."""


@dataclass(frozen=True)
class Figure:
    """One plot; `columns` and `rows` are its data, in the plot's units."""

    title: str
    chart: Chart
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())
    names: Sequence[str] = field(default=())
    """Names of the axis whose stand-ins are in the chart."""


@dataclass(frozen=True)
class Absent:
    """A plot for which this run has no data, and why."""

    title: str
    reason: str


Drawn = Figure | Absent


def first(entries: Sequence[Entry], notes: list[str]) -> Sequence[Entry]:
    """As many entries as a plot has room for; if some are left out, append a note that says so."""
    if len(entries) > MOST_ROWS:
        notes.append(f"The first {MOST_ROWS} of {len(entries)} rows; the table below has all.")
    return entries[:MOST_ROWS]


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
