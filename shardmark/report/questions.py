"""What a run's tests say of their questions: each one's columns and plots, and the observers of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.observers import WITH_COLUMNS, Observer
from shardmark.report.columns import COLUMNS, DEFAULT, Column, Entry, among
from shardmark.report.plots import Plot, saved

KNOWN = {
    column.name: column
    for column in among(COLUMNS.values(), (own for observer in WITH_COLUMNS for own in observer.columns))
}
"""The columns that a question may name, the observers' among them, in the order in which `-v` shows them."""

MOST_COLUMNS = 7
"""More are read by nobody at once; `-v` shows them all."""


@dataclass
class Question:
    """One question: what its table shows, and who has lines under it."""

    columns: tuple[Column, ...] = tuple(COLUMNS[name] for name in DEFAULT)
    observers: dict[type[Observer], Observer] = field(default_factory=dict)
    plots: tuple[Plot, ...] = ()
    stated: bool = False
    """Whether a test has said which columns."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The observers' lines under its table."""
        for observer in self.observers.values():
            yield from observer.lines(entries)

    def all_columns(self) -> list[Column]:
        """Every column there is; the question's own ones each stand behind the one that its test names before it."""
        own = [column for observer in self.observers.values() for column in observer.columns]
        columns = among(KNOWN.values(), (column for column in own if column not in KNOWN.values()))
        for before, column in zip((None, *self.columns), self.columns, strict=False):
            if column not in columns:
                columns.insert(0 if before is None else columns.index(before) + 1, column)
        return columns


class Questions:
    """The questions of a run, by their text."""

    def __init__(self) -> None:
        self._questions: dict[str | None, Question] = {}

    def __getitem__(self, text: str | None) -> Question:
        return self._questions.setdefault(text, Question())

    def state(self, marker: pytest.Mark) -> None:
        """Take the columns and the plots of a test's `question(text, columns=..., plots=...)`. Raises
        pytest.UsageError, in one line."""
        text, wanted = marker.args[0], marker.kwargs.get("columns")
        self[text].plots += tuple(plot for plot in marker.kwargs.get("plots", ()) if plot not in self[text].plots)
        if wanted is None:
            return
        columns = tuple(_column(text, each) for each in wanted)
        question = self[text]
        if len(columns) > MOST_COLUMNS:
            raise pytest.UsageError(
                f"question {text!r} has {len(columns)} columns, and a table shows {MOST_COLUMNS} at most; -v shows all"
            )
        if question.stated and columns != question.columns:
            names = " and ".join(", ".join(column.name for column in each) for each in (question.columns, columns))
            raise pytest.UsageError(f"question {text!r} has two lists of columns, where its tests share one: {names}")
        question.columns, question.stated = columns, True

    def saved(self) -> list[dict[str, Any]]:
        """What a report of the saved run has to know of each: the names of its columns, and its plots."""
        return [
            {"text": text, "columns": [column.name for column in each.columns], "plots": [*map(saved, each.plots)]}
            for text, each in self._questions.items()
        ]

    def own_cells(self, entry: Entry) -> dict[str, str]:
        """What the columns that this question alone has say of a row: their code is not saved with it."""
        own = [column for column in self[entry["group"]].columns if column not in KNOWN.values()]
        cells = {column.name: column.cell(entry, entry["extra_info"]) for column in own}
        return {name: text for name, text in cells.items() if text is not None}

    def observe(self, text: str | None, observers: Sequence[Observer]) -> None:
        """Note the observers of a row of that question."""
        for observer in observers:
            self[text].observers.setdefault(type(observer), observer)


def _column(question: str, wanted: Any) -> Column:
    if isinstance(wanted, Column):
        return wanted
    if wanted not in KNOWN:
        raise pytest.UsageError(f"question {question!r} has no column {wanted!r}; the columns are {', '.join(KNOWN)}")
    return KNOWN[wanted]
