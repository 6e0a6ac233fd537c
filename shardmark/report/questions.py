"""Questions, as tests declare them: columns, answer and plots, and the observers of their rows.

    @pytest.mark.question("What does a nap cost?", short="naps", columns=["case", "time ms"], answer=fastest)

`Questions.saved` is what a run's file keeps of them, for reports that do not have the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.report.answers import NO_ANSWER, NOT_MEASURED, Answer, answered, fastest_and_smallest
from shardmark.report.outcomes import Outcomes, first_line
from shardmark.report.plots import Plot, saved
from shardmark.rows.columns import COLUMNS, DEFAULT, Column, Entry, among
from shardmark.rows.observers import WITH_COLUMNS, Observer

KNOWN = {
    column.name: column
    for column in among(COLUMNS.values(), (own for observer in WITH_COLUMNS for own in observer.columns))
}
"""All columns that a question may name, observers' columns included, in the order of `-v`."""

MOST_COLUMNS = 7
"""Most columns of a question's table; `-v` shows them all."""


OTHERS = "other measurements"
"""Title of rows whose tests name no question."""

STATED = {"columns": "lists of columns", "short": "short forms", "answer": "answers", "derivation": "derivations"}
"""Arguments on which all tests of a question must agree, and their plural in the error message."""


NO_CASES = "got empty parameter set"
"""pytest's reason to skip a test whose grid is empty at this scale."""


@dataclass
class Question:
    """One question: the columns of its table, the lines under it, its answer and its plots."""

    columns: tuple[Column, ...] = tuple(COLUMNS[name] for name in DEFAULT)
    short: str | None = None
    """The question in a few words, for lists of questions."""
    answer: Answer | str = fastest_and_smallest
    """A function of the question's rows; or the text of a derived answer, which holds if the tests pass."""
    derivation: tuple[str, ...] = ()
    """Lines that derive such a text; of a question from a run's file, all lines under its table."""
    observers: dict[type[Observer], Observer] = field(default_factory=dict)
    plots: tuple[Plot, ...] = ()
    stated: set[str] = field(default_factory=set)
    """Names of the arguments that some test has given."""
    tests: set[str] = field(default_factory=set)
    """Full names of the tests that this run measures for it."""
    kept_answer: str | None = None
    """The answer, read from a run's file."""

    def answered(self, entries: Sequence[Entry], outcomes: Outcomes) -> str | None:
        """The answer, or why there is none; None if the question has no cases at this scale."""
        if self.kept_answer is not None:
            return self.kept_answer
        if entries and not isinstance(self.answer, str):
            return answered(entries, self.answer, outcomes.failed)
        if failed := self.tests & outcomes.failed.keys():
            return f"{NO_ANSWER}: {len(failed)} failed."
        if isinstance(self.answer, str) and self.tests & outcomes.passed:
            return self.answer
        why = outcomes.why_skipped(self.tests)
        return None if why is None or why.startswith(NO_CASES) else f"{NOT_MEASURED}: {first_line(why).rstrip('.')}."

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The lines under its table: the derivation, then those of the observers."""
        yield from self.derivation
        for observer in self.observers.values():
            yield from observer.lines(entries)

    def all_columns(self) -> list[Column]:
        """All columns, for `-v`; each of the question's own follows the column that its test names before it."""
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
        """The questions of a run's file, without their plots, which only the page reads."""
        questions = cls()
        for each in saved:
            question = questions[each["text"]]
            question.columns = tuple(map(column_named, each["columns"]))
            question.short, question.kept_answer = each["short"], each["answer"]
            question.derivation = tuple(each["lines"])
        return questions

    def name(self, text: str | None) -> str:
        """The short form of the question, or its text."""
        return self[text].short or text or OTHERS

    def saved(self) -> list[dict[str, Any]]:
        """Each question as JSON, for the run's file; answers and lines are filled in by `answered`."""
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
        """`saved`, with the answers and the lines under the tables. Called once all entries are there."""
        said = list(self.answers(entries, outcomes))
        found = {each["text"]: each for each in self.saved()}
        for text, group, answer in said:
            found[text] |= {"answer": answer, "lines": [*self[text].lines(group)]}
        return list(found.values())

    def answers(self, entries: Sequence[Entry], outcomes: Outcomes) -> Iterator[tuple[str | None, list[Entry], str]]:
        """Yield (question, its entries, its answer) in the order of the tests."""
        groups: dict[str | None, list[Entry]] = {text: [] for text in self._questions}
        for entry in entries:
            groups.setdefault(entry["group"], []).append(entry)
        for text, group in groups.items():
            if (answer := self[text].answered(group, outcomes)) is not None:
                yield text, group, answer

    def derivations(self, entries: Sequence[Entry]) -> Iterator[tuple[str | None, list[str]]]:
        """Yield (question, lines) for each derived answer whose tests measured nothing."""
        measured = {entry["group"] for entry in entries}
        for text, each in self._questions.items():
            asked = each.tests or each.kept_answer is not None
            if text not in measured and asked and (lines := [*each.lines([])]):
                yield text, lines

    def __getitem__(self, text: str | None) -> Question:
        return self._questions.setdefault(text, Question())

    def state(self, marker: pytest.Mark) -> None:
        """Take a test's `question(text, columns=..., short=..., answer=..., derivation=..., plots=...)`.

        Raises pytest.UsageError, in one line.
        """
        text, said = marker.args[0], {name: value for name, value in marker.kwargs.items() if value is not None}
        self[text].plots += tuple(plot for plot in said.pop("plots", ()) if plot not in self[text].plots)
        if unknown := sorted(said.keys() - STATED.keys()):
            known = ", ".join([*STATED, "plots"])
            raise pytest.UsageError(f"question {text!r} takes {known}, not {', '.join(unknown)}")
        if "columns" in said:
            said["columns"] = tuple(_column(text, each) for each in said["columns"])
            if (count := len(said["columns"])) > MOST_COLUMNS:
                most = f"a table shows {MOST_COLUMNS} at most; -v shows all"
                raise pytest.UsageError(f"question {text!r} has {count} columns, and {most}")
        question = self[text]
        for name, value in said.items():
            before = getattr(question, name)
            if name in question.stated and value != before:
                both = f"{_named(before)} and {_named(value)}"
                raise pytest.UsageError(f"question {text!r} has two {STATED[name]}, where its tests share one: {both}")
            setattr(question, name, value)
            question.stated.add(name)

    def own_cells(self, entry: Entry) -> dict[str, str]:
        """Cells of a row in the question's own columns, by name. They are saved, as the columns' code cannot be."""
        cells: dict[str, str] = {}
        for column in self[entry["group"]].columns:
            with suppress(Exception):  # the row is worth more than its cell
                if column not in KNOWN.values() and (cell := column.cell(entry, entry["extra_info"])) is not None:
                    cells[column.name] = cell
        return cells

    def observe(self, text: str | None, observers: Sequence[Observer]) -> None:
        """Add the observers of one of the question's rows."""
        for observer in observers:
            self[text].observers.setdefault(type(observer), observer)


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(getattr(each, "name", each)) for each in value)
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))


def column_named(name: str) -> Column:
    """The known column of that name; otherwise a question's own column, which reads the cells saved in the entries."""
    return KNOWN.get(name) or Column(name, lambda entry, row: entry.get("cells", {}).get(name))


def _column(question: str, wanted: Any) -> Column:
    if isinstance(wanted, Column):
        return wanted
    if wanted not in KNOWN:
        raise pytest.UsageError(f"question {question!r} has no column {wanted!r}; the columns are {', '.join(KNOWN)}")
    return KNOWN[wanted]
