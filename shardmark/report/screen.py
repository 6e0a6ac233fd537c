"""The screen that ends a run: the machine, what failed, goals and answers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from shardmark.report.answers import LEGEND
from shardmark.report.outcomes import first_line
from shardmark.report.summary import Summary
from shardmark.text import cut, printable
from shardmark.verdict.betting import MISSED, UNDECIDED

LEAST, MOST = 80, 120
"""Characters of a line: the terminal's width, within these limits."""

NAME, SHORT = 38, 28
"""Most characters of a test's name, and of a question's short form."""

LINES = 2
"""Most lines of an answer."""

SHOWN = {"failed": 8, UNDECIDED: 3, MISSED: 3}
"""Lines shown of each kind; the others are counted."""

Styled = tuple[str, dict[str, Any]]


def screen_lines(summary: Summary, width: int, verbose: bool = False) -> Iterator[Styled]:
    """Yield (line, colours), at most `width` characters a line; `verbose` shows all lines, uncut."""
    yield from _wrapped(summary.where(), width)
    yield from _wrapped(summary.what(), width)
    if busy := summary.busy():
        yield from _wrapped(busy, width, yellow=True)
    outcomes = summary.outcomes
    lists: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("failed", outcomes.failed, {"red": True}),
        (UNDECIDED, outcomes.undecided, {"yellow": True}),
    ]
    for title, tests, style in lists:
        if tests:
            yield "", {}
            yield f"{title}: {len(tests)}", {**style, "bold": True}
            named = [(summary.name(test), first_line(why)) for test, why in tests.items()]
            yield from ((line, style) for line in _listed(named, width, None if verbose else SHOWN[title]))
    if goals := summary.goals():
        yield "", {}
        yield goals, {"bold": True}
        yield from ((line, {}) for line in _listed(list(summary.missed()), width, None if verbose else SHOWN[MISSED]))
    yield "", {}
    yield "answers", {"bold": True}
    yield from _wrapped(LEGEND, width)
    answers = list(summary.questions.answers(summary.entries, outcomes))
    names = [printable(summary.questions.name(text)) for text, *_ in answers]
    room = min(max(map(len, names), default=0), SHORT)
    for name, (*_, answer) in zip(names, answers, strict=True):
        said = textwrap.TextWrapper(width - room - 2, subsequent_indent="  ", placeholder="...")
        said.max_lines = None if verbose else LINES
        for start, line in zip_longest([cut(name, room)], said.wrap(printable(answer)), fillvalue=""):
            yield f"{start:{room}}  {line}", {}
    yield "", {}


def _listed(named: list[tuple[str, str]], width: int, most: int | None) -> Iterator[str]:
    """A line for each of the first `most`, then the number of the others; with None all of them, uncut."""
    shown = named[:most]
    room = min(max((len(printable(name)) for name, _ in shown), default=0), NAME)
    for name, why in shown:
        line = f"  {cut(printable(name), room).ljust(room)}  {printable(why)}"
        yield line if most is None else cut(line, width)
    if len(named) > len(shown):
        yield f"  and {len(named) - len(shown)} more"


def _wrapped(text: str, width: int, **style: Any) -> Iterator[Styled]:
    return ((line, style) for line in textwrap.wrap(printable(text), width, subsequent_indent="  "))
