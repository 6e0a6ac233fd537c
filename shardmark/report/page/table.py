"""A question's rows as the page's table, and any table as a file to download."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shardmark.report.page.figure import Cell
from shardmark.report.questions import KNOWN, column_named
from shardmark.report.tables import with_ranks
from shardmark.rows.columns import DEFAULT, Entry


@dataclass(frozen=True)
class Heading:
    """A column's name; whether it is aligned to the left, and whether it is shown only with all columns."""

    name: str
    left: bool
    extra: bool


@dataclass(frozen=True)
class Table:
    """All columns that some row fills, those that the question names among them."""

    headings: list[Heading]
    rows: list[list[str]]


def table(entries: Sequence[Entry], question: Mapping[str, Any]) -> Table:
    """The rows of a question, whose columns are named by its test, or those that every question's table has."""
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
    """A link that is itself the file: CSV, in which no name is a spreadsheet's formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[_inert(each) for each in row] for row in (columns, *rows)])
    return "data:text/csv;charset=utf-8," + quote(file.getvalue(), safe=" ,;:/()[]=+*@!$'?\n")


def _inert(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t")) else cell
