"""What a run's tests say of their questions: each one's columns, answer and plots, and the observers of its rows.

    @pytest.mark.question("What does a nap cost?", short="naps", columns=["case", "time ms"], answer=fastest)

A run's file keeps of it what cannot be read from rows without the tests: see `Questions.saved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.report.answers import NO_ANSWER, Answer, answered, fastest_and_smallest
from shardmark.report.outcomes import Outcomes, first_line
from shardmark.report.plots import Plot, saved
from shardmark.rows.columns import COLUMNS, DEFAULT, Column, Entry, among
from shardmark.rows.observers import WITH_COLUMNS, Observer

KNOWN = {
    column.name: column
    for column in among(COLUMNS.values(), (own for observer in WITH_COLUMNS for own in observer.columns))
}
"""The columns that a question may name, the observers' among them, in the order in which `-v` shows them."""

MOST_COLUMNS = 7
"""More are read by nobody at once; `-v` shows them all."""


OTHERS = "other measurements"
"""What the rows of tests that name no question are called."""

STATED = {"columns": "lists of columns", "short": "short forms", "answer": "answers", "derivation": "derivations"}
"""What all tests of a question that say it say alike, and what it is called when they do not."""


NO_CASES = "got empty parameter set"
"""What pytest says of a test whose grid is empty at this scale."""


@dataclass
class Question:
    """One question: what its table shows, who has lines under it, and how its answer is read from its rows."""

    columns: tuple[Column, ...] = tuple(COLUMNS[name] for name in DEFAULT)
    short: str | None = None
    """The question in a few words, for a line that the answer shares."""
    answer: Answer | str = fastest_and_smallest
    """Read from its rows; a text where it is derived, which holds if its tests pass."""
    derivation: tuple[str, ...] = ()
    """Lines that say how such a text is derived."""
    observers: dict[type[Observer], Observer] = field(default_factory=dict)
    plots: tuple[Plot, ...] = ()
    stated: set[str] = field(default_factory=set)
    """What of it a test has said."""
    tests: set[str] = field(default_factory=set)
    """Full names of those that this run measures for it."""
    kept_lines: tuple[str, ...] = ()
    """Of a run's file, the lines that were under its table."""
    kept_answer: str | None = None
    """Of a run's file, what it answered."""

    def answered(self, entries: Sequence[Entry], outcomes: Outcomes) -> str | None:
        """The answer in one line; None where there is nothing to ask, as of a grid without cases at this scale."""
        if self.kept_answer is not None:
            return self.kept_answer
        if entries and not isinstance(self.answer, str):
            return answered(entries, self.answer, outcomes.failed)
        if failed := self.tests & outcomes.failed.keys():
            return f"{NO_ANSWER}: {len(failed)} failed"
        if isinstance(self.answer, str) and self.tests & outcomes.passed:
            return self.answer
        why = outcomes.why_skipped(self.tests)
        return None if why is None or why.startswith(NO_CASES) else f"not measured: {first_line(why)}"

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The lines under its table: how it is derived, and what the observers have."""
        yield from self.kept_lines
        yield from self.derivation
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

    @classmethod
    def of(cls, saved: Iterable[dict[str, Any]]) -> Questions:
        """The questions that a run's file has saved; their plots are read by the page alone."""
        questions = cls()
        for each in saved:
            question = questions[each["text"]]
            question.columns = tuple(map(column_named, each["columns"]))
            question.short, question.kept_answer = each["short"], each["answer"]
            question.kept_lines = tuple(each["lines"])
        return questions

    def name(self, text: str | None) -> str:
        """The question of that text in few words, for a line that its answer shares."""
        return self[text].short or text or OTHERS

    def saved(self) -> list[dict[str, Any]]:
        """What a report of the saved run has to know of each before its answer: the names of its columns, its plots."""
        return [
            {
                "text": text,
                "short": each.short,
                "columns": [column.name for column in each.columns],
                "plots": [*map(saved, each.plots)],
                "answer": None,
                "lines": [],
            }
            for text, each in self._questions.items()
        ]

    def answered(self, entries: Sequence[Entry], outcomes: Outcomes) -> list[dict[str, Any]]:
        """The same with its answer and the lines under its table, once all entries are there."""
        said = {text: (answer, group) for text, group, answer in self.answers(entries, outcomes)}
        return [
            {**each, "answer": said[text][0], "lines": [*self[text].lines(said[text][1])]} if text in said else each
            for each in self.saved()
            for text in [each["text"]]
        ]

    def answers(self, entries: Sequence[Entry], outcomes: Outcomes) -> Iterator[tuple[str | None, list[Entry], str]]:
        """Each question with its entries and its answer, in the order in which they were asked."""
        groups: dict[str | None, list[Entry]] = {text: [] for text in self._questions}
        for entry in entries:
            groups.setdefault(entry["group"], []).append(entry)
        for text, group in groups.items():
            if (answer := self[text].answered(group, outcomes)) is not None:
                yield text, group, answer

    def derivations(self, entries: Sequence[Entry]) -> Iterator[tuple[str | None, list[str]]]:
        """The lines that derive an answer, of each question whose tests measured nothing."""
        measured = {entry["group"] for entry in entries}
        for text, each in self._questions.items():
            if text not in measured and (each.tests or each.kept_lines) and (lines := [*each.lines([])]):
                yield text, lines

    def __getitem__(self, text: str | None) -> Question:
        return self._questions.setdefault(text, Question())

    def state(self, marker: pytest.Mark) -> None:
        """Take a test's `question(text, columns=..., short=..., answer=..., derivation=..., plots=...)`.

        Raises pytest.UsageError, in one line.
        """
        text, said = marker.args[0], dict(marker.kwargs)
        self[text].plots += tuple(plot for plot in said.pop("plots", ()) if plot not in self[text].plots)
        if unknown := sorted(said.keys() - STATED.keys()):
            known = ", ".join([*STATED, "plots"])
            raise pytest.UsageError(f"question {text!r} takes {known}, not {', '.join(unknown)}")
        if said.get("columns") is not None:
            said["columns"] = tuple(_column(text, each) for each in said["columns"])
        question = self[text]
        for name, value in said.items():
            if value is None:
                continue
            if name == "columns" and len(value) > MOST_COLUMNS:
                raise pytest.UsageError(
                    f"question {text!r} has {len(value)} columns, and a table shows {MOST_COLUMNS} at most; "
                    "-v shows all"
                )
            before = getattr(question, name)
            if name in question.stated and value != before:
                both = f"{_named(before)} and {_named(value)}"
                raise pytest.UsageError(f"question {text!r} has two {STATED[name]}, where its tests share one: {both}")
            setattr(question, name, value)
            question.stated.add(name)

    def own_cells(self, entry: Entry) -> dict[str, str]:
        """What the columns that this question alone has say of a row: their code is not saved with it."""
        cells: dict[str, str] = {}
        for column in self[entry["group"]].columns:
            with suppress(Exception):  # the row is worth more than its cell
                if column not in KNOWN.values() and (cell := column.cell(entry, entry["extra_info"])) is not None:
                    cells[column.name] = cell
        return cells

    def observe(self, text: str | None, observers: Sequence[Observer]) -> None:
        """Note the observers of a row of that question."""
        for observer in observers:
            self[text].observers.setdefault(type(observer), observer)


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(getattr(each, "name", each)) for each in value)
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))


def column_named(name: str) -> Column:
    """The column of that name in a run's file: a known one, or a question's own, whose cells are in the entries."""
    return KNOWN.get(name) or Column(name, lambda entry, row: entry.get("cells", {}).get(name))


def _column(question: str, wanted: Any) -> Column:
    if isinstance(wanted, Column):
        return wanted
    if wanted not in KNOWN:
        raise pytest.UsageError(f"question {question!r} has no column {wanted!r}; the columns are {', '.join(KNOWN)}")
    return KNOWN[wanted]
