"""A question's rows as the page's table, and any table as a file to download."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shardmark.report.columns import COLUMNS, DEFAULT, Entry
from shardmark.report.page.figure import Cell
from shardmark.report.questions import KNOWN


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
    named = [*question.get("columns", DEFAULT)]
    if "ranks" not in named and len({entry["extra_info"]["world_size"] for entry in entries}) > 1:
        named.insert(2, "ranks")  # or rows could not be told apart
    own = [name for entry in entries for name in entry.get("cells", {})]
    names = [name for name in dict.fromkeys([*named, *KNOWN, *own]) if name in KNOWN or name in own]
    texts = {name: [_cell(name, entry) for entry in entries] for name in names}
    shown = [name for name in names if name in named[:2] or set(texts[name]) - {None, _trivial(name)}]
    return Table(
        [Heading(name, name in KNOWN and KNOWN[name].left, name not in named) for name in shown],
        [[texts[name][place] or "" for name in shown] for place in range(len(entries))],
    )


def _cell(name: str, entry: Entry) -> str | None:
    column = KNOWN.get(name)
    text = column.cell(entry, entry["extra_info"]) if column is not None else entry.get("cells", {}).get(name)
    return None if text is None else str(text)


def _trivial(name: str) -> str | None:
    return COLUMNS[name].trivial if name in COLUMNS else None


def as_link(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A link that is itself the file: CSV, in which no name is a spreadsheet's formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[_inert(each) for each in row] for row in (columns, *rows)])
    return "data:text/csv;charset=utf-8," + quote(file.getvalue(), safe=" ,;:/()[]=+*@!$'?\n")


def _inert(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t")) else cell
