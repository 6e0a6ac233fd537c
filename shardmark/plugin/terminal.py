"""The end of a run on the terminal: one screen, and with -v its tables before that."""

from __future__ import annotations

import pytest

from shardmark.plugin.session import Session
from shardmark.report import tables
from shardmark.report.screen import LEAST, MOST, screen_lines
from shardmark.report.summary import Summary
from shardmark.text import printable

REPORTED = "fE"
"""pytest's default for -r, which lists failures and errors: the user has not asked for another list."""


def write_summary(terminal: pytest.TerminalReporter, session: Session, verbose: bool) -> None:
    """Print the screen, then the rows' file and the budgets that matched no test."""
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
            terminal.reportchars = ""  # the screen has listed what failed
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
