"""A section of the page: a question, the plot that answers it, its other plots, and its rows as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.report.page.bars import after_stages, memory, time_by_kernel, time_by_part
from shardmark.report.page.dots import times
from shardmark.report.page.figure import Absent, Anchors, Drawn
from shardmark.report.page.lines import lines
from shardmark.report.page.predicted import streams
from shardmark.report.page.published import points
from shardmark.report.page.spans import spans
from shardmark.report.page.timelines import by_kind
from shardmark.report.plots import AUTOMATIC, Automatic, Lines, Points, restored
from shardmark.report.questions import KNOWN, OTHERS, column_named
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
    """All columns that some row fills, the question's own first; `anchors` are the ids of the rows."""

    headings: list[Heading]
    rows: list[list[str]]
    anchors: list[str]


@dataclass(frozen=True)
class Section:
    """All that the page shows of a question with rows; the first of `drawn` answers it."""

    name: str
    """The question in a few words."""
    title: str
    anchor: str
    drawn: list[tuple[str, Drawn]]
    """(id, plot) of each."""
    absent: list[Absent]
    table: Table
    lines: list[str]
    """Lines that the terminal prints under the table with -v."""


def section(
    text: str | None,
    entries: Sequence[Entry],
    question: Mapping[str, Any],
    device_bytes: float | None,
    anchors: Anchors,
) -> Section:
    """The question's own plots in its order, then the plots that need no declaration.

    Raises KeyError, TypeError, ValueError or AttributeError where a plot or a row was written by another version.
    """
    title = text or OTHERS
    name = question.get("short") or title
    rows = {entry["fullname"]: anchors("row", entry["name"].removeprefix("test_")) for entry in entries}
    drawn = list(_drawn(entries, question, device_bytes, rows))
    return Section(
        name,
        title,
        anchors("question", name),
        [(anchors("plot", name, each.title), each) for each in drawn if not isinstance(each, Absent)],
        [each for each in drawn if isinstance(each, Absent)],
        table(entries, question, rows),
        [*question.get("lines", [])],
    )


def _drawn(
    entries: Sequence[Entry], question: Mapping[str, Any], device_bytes: float | None, rows: Mapping[str, str]
) -> Iterator[Drawn]:
    makers: dict[str, Callable[[], Drawn | None]] = {
        "times": lambda: times(entries, rows),
        "memory": lambda: memory(entries, rows),
        "parts": lambda: time_by_part(entries, rows),
        "kernels": lambda: time_by_kernel(entries, rows),
        "streams": lambda: streams(entries),
        "spans": lambda: spans(entries),
        "kinds": lambda: by_kind(entries, device_bytes),
    }
    declared = [restored(each) for each in question.get("plots", ())]
    named = [each.name for each in declared if isinstance(each, Automatic)]
    for plot in (*declared, *(Automatic(name) for name in AUTOMATIC if name not in named)):
        if isinstance(plot, Lines):
            yield lines(plot, entries)
        elif isinstance(plot, Points):  # with published figures they are on a page of their own
            yield from () if plot.published else (points(plot, entries),)
        elif isinstance(plot, Automatic) and plot.name == "stages":
            yield from after_stages(entries, rows)
        elif isinstance(plot, Automatic) and (made := makers[plot.name]()) is not None:
            yield made


def table(entries: Sequence[Entry], question: Mapping[str, Any], anchors: Mapping[str, str]) -> Table:
    """The rows of a question in the columns that its test names, by default `DEFAULT`; the others are extra.

    The implementation is the first column, which stays in sight while the others scroll.
    """
    asked = with_ranks([column_named(name) for name in question.get("columns", DEFAULT)], entries)
    named = sorted((column.name for column in asked), key=lambda name: name != "implementation")
    own = [name for entry in entries for name in entry.get("cells", {})]
    shown, columns = [], []
    for column in map(column_named, dict.fromkeys([*named, *KNOWN, *own])):
        cells = [column.cell(entry, entry["extra_info"]) for entry in entries]
        if column.name in named[:2] or set(cells) - {None, column.trivial}:
            shown.append(Heading(column.name, column.left, column.name not in named))
            columns.append(["" if cell is None else str(cell) for cell in cells])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Table(shown, rows, [anchors[entry["fullname"]] for entry in entries])
