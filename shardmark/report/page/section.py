"""A section of the page: a question, its plots, and its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.report.page.bars import time_and_peak, time_by_kernel, time_by_part
from shardmark.report.page.figure import Absent, Drawn, Figure
from shardmark.report.page.lines import lines, points
from shardmark.report.page.memory_plots import by_kind, by_stage
from shardmark.report.page.predicted import streams
from shardmark.report.page.table import Table, table
from shardmark.report.plots import Lines, restored
from shardmark.rows.columns import Entry


@dataclass(frozen=True)
class Section:
    """What is shown of a question."""

    title: str
    figures: list[Figure]
    absent: list[Absent]
    table: Table
    lines: list[str]
    """What the terminal has under the table with -v."""


def section(title: str, entries: Sequence[Entry], question: Mapping[str, Any], device_bytes: float | None) -> Section:
    """The question's own plots, then those of what every row may have. Raises KeyError, TypeError, ValueError or
    AttributeError where a plot or a row is of another version."""
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
