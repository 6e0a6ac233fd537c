"""What a run writes on the terminal when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardmark.report import tables, undecided
from shardmark.report.layout import printable

if TYPE_CHECKING:
    from shardmark.session import Session


def write_summary(terminal: pytest.TerminalReporter, session: Session, every_column: bool) -> None:
    """A table per question, where the rows are, and the budgets that no test matched."""
    rows = session.rows.rows
    for title, lines in tables.render(rows, session.questions, every_column):
        terminal.section(title, sep="-")
        for line in lines:
            terminal.write_line(line)
    if goals := tables.goals_line(rows):
        terminal.write_line(f"\n{goals}")
    for report in terminal.stats.get(undecided.OUTCOME, []):
        terminal.write_line(f"\n{undecided.OUTCOME}: {report.nodeid}: {undecided.why(report)}", yellow=True)
    if rows and not every_column:
        terminal.write_line("\n-v shows all columns")
    if rows and session.rows.path is not None:
        terminal.write_line(f"\n{len(rows)} row{'s' * (len(rows) != 1)} in {printable(str(session.rows.path))}")
    for option, trouble in (("json", session.rows.trouble), ("save", session.rows.not_saved)):
        if trouble is not None:
            terminal.write_line(printable(f"--benchmark-{option}: {trouble}"), red=True)
    for budget in session.budgets:
        if budget.pattern not in session.matched_budgets:
            terminal.write_line(f'--budgets: no measured test matches "{printable(budget.pattern)}"', yellow=True)
