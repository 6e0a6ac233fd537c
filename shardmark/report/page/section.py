"""A section of the page: a question, its plots, and its rows as a table, which is also a file to download."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shardmark.report.page.bars import time_and_peak, time_by_kernel, time_by_part
from shardmark.report.page.figure import Absent, Cell, Drawn, Figure
from shardmark.report.page.lines import lines, points
from shardmark.report.page.memory_plots import by_kind, by_stage
from shardmark.report.page.predicted import streams
from shardmark.report.plots import Lines, restored
from shardmark.report.questions import KNOWN, column_named
from shardmark.report.tables import with_ranks
from shardmark.rows.columns import DEFAULT, Entry


@dataclass(frozen=True)
class Heading:
    """A column's name, whether it is left-aligned, and whether only "all columns" shows it."""

    name: str
    left: bool
    extra: bool


@dataclass(frozen=True)
class Table:
    """All columns that some row fills, the question's own first."""

    headings: list[Heading]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """All that the page shows of a question."""

    title: str
    figures: list[Figure]
    absent: list[Absent]
    table: Table
    lines: list[str]
    """Lines that the terminal prints under the table with -v."""


def section(title: str, entries: Sequence[Entry], question: Mapping[str, Any], device_bytes: float | None) -> Section:
    """The question's own plots, then the plots that need no declaration.

    Raises KeyError, TypeError, ValueError or AttributeError where a plot or a row was written by another version.
    """
    drawn = list(_drawn(entries, question, device_bytes))
    return Section(
        title,
        [each for each in drawn if isinstance(each, Figure)],
        [each for each in drawn if isinstance(each, Absent)],
        table(entries, question),
        [*question.get("lines", [])],
    )


def _drawn(entries: Sequence[Entry], question: Mapping[str, Any], device_bytes: float | None) -> Iterator[Drawn]:
    for each in question.get("plots", ()):
        plot = restored(each)
        yield lines(plot, entries) if isinstance(plot, Lines) else points(plot, entries)
    yield from (each for each in (time_and_peak(entries), time_by_part(entries), time_by_kernel(entries)) if each)
    yield from streams(entries)
    yield from by_kind(entries, device_bytes)
    yield from by_stage(entries)


def table(entries: Sequence[Entry], question: Mapping[str, Any]) -> Table:
    """The rows of a question in the columns that its test names, by default `DEFAULT`; the others are extra."""
    asked = with_ranks([column_named(name) for name in question.get("columns", DEFAULT)], entries)
    named = [column.name for column in asked]
    own = [name for entry in entries for name in entry.get("cells", {})]
    shown, columns = [], []
    for column in map(column_named, dict.fromkeys([*named, *KNOWN, *own])):
        cells = [column.cell(entry, entry["extra_info"]) for entry in entries]
        if column.name in named[:2] or set(cells) - {None, column.trivial}:
            shown.append(Heading(column.name, column.left, column.name not in named))
            columns.append(["" if cell is None else str(cell) for cell in cells])
    return Table(shown, [list(row) for row in zip(*columns, strict=True)])


def as_link(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A data: link that holds the CSV file, in which no cell is a spreadsheet's formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[_inert(each) for each in row] for row in (columns, *rows)])
    return "data:text/csv;charset=utf-8," + quote(file.getvalue(), safe=" ,;:/()[]=+*@!$'?\n")


def _inert(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t")) else cell
