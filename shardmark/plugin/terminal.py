"""The end of a run on the terminal: one screen, and with -v the tables before it."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import pytest

from shardmark.plugin.session import Session
from shardmark.ranks.signals import Ending
from shardmark.report import tables
from shardmark.report.screen import LEAST, MOST, Styled, screen_lines
from shardmark.report.summary import Summary
from shardmark.text import printable

REPORTED = "fE"
"""pytest's default for -r, which lists failures and errors: the user has not asked for another list."""


def write_summary(terminal: pytest.TerminalReporter, session: Session, verbose: bool) -> None:
    """Print the screen, with the rows' file and the budgets that matched no test; what failed comes last, and below it
    the rows that are not where they were asked for, which the first line says too."""
    rows = session.rows.rows
    lost = [printable(line) for line in session.rows.lost]
    for line in lost:
        terminal.write_line(line, red=True)
    if verbose:
        for title, lines in tables.render(rows, session.questions, every_column=True):
            terminal.section(title, sep="-")
            for line in lines:
                terminal.write_line(line)
    files = list(_files(session))
    if rows:
        summary = Summary(rows, session.questions, session.outcomes, session.rows.machine_info, lacks_rows=bool(lost))
        width = min(max(terminal._tw.fullwidth, LEAST), MOST)
        terminal.write_sep("-", "what this run says")
        files = screen_lines(summary, width, files, verbose)
        if terminal.config.option.reportchars == REPORTED:
            terminal.reportchars = ""  # the screen lists what failed
    for text, style in files:
        terminal.write_line(text, **style)
    for line in lost:
        terminal.write_line(line, red=True)


def _files(session: Session) -> Iterator[Styled]:
    """Where the rows are, and budgets without a test."""
    rows = session.rows.rows
    if rows and session.rows.path is not None:
        yield f"{len(rows)} row{'s' * (len(rows) != 1)} in {printable(str(session.rows.path))}", {}
    for budget in session.budgets:
        if budget.pattern not in session.matched_budgets:
            yield f'--budgets: no measured test matches "{printable(budget.pattern)}"', {"yellow": True}


class Interrupted:
    """A run that a signal ends."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._ending.stop_repeating()
        _drop_frames_without_a_line(excinfo.tb)


def _drop_frames_without_a_line(entry: TracebackType) -> None:
    """Some at the end of a `with` block have none: on Python 3.11 pytest's report of a Ctrl-C there raises TypeError in
    place of the run's summary."""
    while entry.tb_next is not None:
        if entry.tb_next.tb_lineno is None:
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next
