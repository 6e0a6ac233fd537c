"""The tables of the terminal: one for each question, in the form that papers use.

A table shows the columns that its question names, at most 110 characters wide; with `-v` it shows all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from shardmark.report.questions import MOST_COLUMNS, OTHERS, Questions
from shardmark.rows.columns import COLUMNS, Column, Entry
from shardmark.text import layout

WIDTH = 110
"""Most characters of a line of a table, so that it fits on a screen and into a message."""

KEYS = ("case", "implementation", "ranks", "verdict")
"""Columns that are never dropped to make a table narrower."""


def render(entries: list[Entry], questions: Questions, every_column: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines): each question's table, then each derived answer.

    The implementations of a case are on consecutive lines; a dash is an empty cell.
    """
    for text, group in groupby(together(entries, question), key=question):
        rows, asked = together(list(group), case), questions[text]
        table = _lines(rows, _filled(rows, asked.all_columns())) if every_column else _narrow(rows, asked.columns)
        yield _title(text, rows), [*table, *asked.lines(rows)]
    for text, lines in questions.derivations(entries):
        yield text or OTHERS, lines


def _title(text: str | None, rows: list[Entry]) -> str:
    link = rows[0]["extra_info"].get("link")  # one for all rows of a run
    return (text or OTHERS) + (f" (two hosts, joined at {link})" if link else "")


def question(entry: Entry) -> str | None:
    """The text of the row's question; None if its test names none."""
    return entry["group"]


def case(entry: Entry) -> str:
    """The id of a row's case."""
    return entry["extra_info"]["case"]["id"]


def together(entries: list[Entry], key: Callable[[Entry], Any]) -> list[Entry]:
    """Entries grouped by key; keys, and the entries of each key, keep the order in which they first came."""
    order = {value: place for place, value in enumerate(dict.fromkeys(map(key, entries)))}
    return sorted(entries, key=lambda entry: order[key(entry)])


def _narrow(entries: list[Entry], columns: Sequence[Column]) -> list[str]:
    """The table in at most `WIDTH` characters: first its cells become brief, then its last columns go."""
    shown = _filled(entries, with_ranks(columns, entries)) or [COLUMNS["case"]]
    while _dispensable(shown) and (len(shown) > MOST_COLUMNS or len(_lines(entries, shown)[1]) > WIDTH):
        verbose = [column for column in shown if column.brief is not None]
        if len(shown) <= MOST_COLUMNS and verbose:
            shown = [
                replace(column, cell=column.brief, brief=None) if column is verbose[0] and column.brief else column
                for column in shown
            ]
        else:
            shown.remove(_dispensable(shown)[-1])
    return _lines(entries, shown)


def with_ranks(columns: Sequence[Column], entries: Sequence[Entry]) -> list[Column]:
    """The columns; "ranks" is inserted third where the rows' world sizes differ."""
    ranks = COLUMNS["ranks"]
    if ranks in columns or len({entry["extra_info"]["world_size"] for entry in entries}) == 1:
        return [*columns]
    return [*columns[:2], ranks, *columns[2:]]


def _dispensable(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.name not in KEYS]


def _filled(entries: list[Entry], columns: Sequence[Column]) -> list[Column]:
    """The columns in which some row has more than a trivial cell."""
    return [
        column
        for column in columns
        if {column.cell(entry, entry["extra_info"]) for entry in entries} - {None, column.trivial}
    ]


def _lines(entries: list[Entry], columns: Sequence[Column]) -> list[str]:
    rows = [{column.name: column.cell(entry, entry["extra_info"]) for column in columns} for entry in entries]
    return layout(rows, [column.name for column in columns if column.left])
