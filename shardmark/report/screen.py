"""What a run writes on the terminal when it ends: one screen, and with -v its tables before that."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import pytest

from shardmark.evidence import MISSED
from shardmark.report import tables
from shardmark.report.answers import LEGEND
from shardmark.report.layout import cut, printable
from shardmark.report.outcomes import first_line
from shardmark.report.summary import Summary
from shardmark.report.undecided import OUTCOME

if TYPE_CHECKING:
    from shardmark.session import Session

LEAST, MOST = 80, 120
"""Characters of a line: as many as the terminal has, between these."""

NAME, SHORT = 38, 28
"""Characters of a test's name, and of a question in short."""

LINES = 2
"""Of an answer, at most."""

SHOWN = {"failed": 8, OUTCOME: 3, MISSED: 3}
"""Lines of each kind; the others are counted."""

REPORTED = "fE"
"""pytest's own list of what failed, where nobody has asked for another."""


def write_summary(terminal: pytest.TerminalReporter, session: Session, verbose: bool) -> None:
    """The machine, what failed, goals and answers; where the rows are; the budgets that no test matched."""
    rows = session.rows.rows
    if verbose:
        for title, lines in tables.render(rows, session.questions, every_column=True):
            terminal.section(title, sep="-")
            for line in lines:
                terminal.write_line(line)
    if rows:
        summary = Summary(rows, session.questions, session.outcomes, session.rows.machine_info)
        terminal.write_sep("-", "what this run says")
        for text, style in screen_lines(summary, min(max(terminal._tw.fullwidth, LEAST), MOST), verbose):
            terminal.write_line(text, **style)
        if terminal.config.option.reportchars == REPORTED:
            terminal.reportchars = ""  # what failed has been said
    if rows and not verbose:
        terminal.write_line("-v shows the tables")
    if rows and session.rows.path is not None:
        terminal.write_line(f"{len(rows)} row{'s' * (len(rows) != 1)} in {printable(str(session.rows.path))}")
    for option, trouble in (("json", session.rows.trouble), ("save", session.rows.not_saved)):
        if trouble is not None:
            terminal.write_line(printable(f"--benchmark-{option}: {trouble}"), red=True)
    for budget in session.budgets:
        if budget.pattern not in session.matched_budgets:
            terminal.write_line(f'--budgets: no measured test matches "{printable(budget.pattern)}"', yellow=True)


Styled = tuple[str, dict[str, Any]]


def screen_lines(summary: Summary, width: int, verbose: bool = False) -> Iterator[Styled]:
    """The lines with their colours, each of `width` characters at most; `verbose` cuts and counts nothing."""
    yield from _wrapped(summary.where(), width)
    yield from _wrapped(summary.what(), width)
    if busy := summary.busy():
        yield from _wrapped(busy, width, yellow=True)
    outcomes = summary.outcomes
    lists: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("failed", outcomes.failed, {"red": True}),
        (OUTCOME, outcomes.undecided, {"yellow": True}),
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
    """A line of each of the first ones, and how many more there are; None is all of them, and in full."""
    shown = named[:most]
    room = min(max((len(printable(name)) for name, _ in shown), default=0), NAME)
    for name, why in shown:
        line = f"  {cut(printable(name), room).ljust(room)}  {printable(why)}"
        yield line if most is None else cut(line, width)
    if len(named) > len(shown):
        yield f"  and {len(named) - len(shown)} more"


def _wrapped(text: str, width: int, **style: Any) -> Iterator[Styled]:
    return ((line, style) for line in textwrap.wrap(printable(text), width, subsequent_indent="  "))
