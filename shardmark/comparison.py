"""What has come of comparing a run's rows with older ones, and the last lines that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from shardmark.against import Change, Compared
from shardmark.evidence import FAIL, UNDECIDED
from shardmark.report.layout import printable

MOST = 10
"""Lines on what is worse, and on what is better; without -v the others are counted."""


class Comparison:
    """By test: of its time, memory and counters, what has come of comparing them."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Compared]] = {}

    def add(self, test_id: str, found: dict[str, Compared]) -> list[tuple[str, str]]:
        """Note it; the verdicts, with what to say of those that are not met or not decided."""
        self._found[test_id] = found
        return [(change.verdict, change.text) for change in _changes(found)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterator[str]) -> None:
        """How many rows were compared and why some were not, the `others`, and what is worse and what is better."""
        for line in (*self._counts(), *others):
            terminal.write_line(line)
        worse, better = (
            self._lines(chosen) for chosen in (lambda each: each.verdict == FAIL, lambda each: each.better)
        )
        for title, lines, style in (("slower or larger", worse, "red"), ("faster or smaller", better, "green")):
            terminal.write_line(f"{title}: {len(lines)}", **{style: bool(lines)})
            shown = lines if terminal.config.option.verbose > 0 else lines[:MOST]
            for line in shown:
                terminal.write_line(line)
            if len(lines) > len(shown):
                terminal.write_line(f"  and {len(lines) - len(shown)} more")

    def _counts(self) -> Iterator[str]:
        for what in ("time", "memory", "counters"):
            results = [found[what] for found in self._found.values()]
            reasons = Counter(result for result in results if isinstance(result, str))
            undecided = sum(change.verdict == UNDECIDED for found in results for change in _changes({what: found}))
            line = f"{what}: {number_of_rows(len(results) - reasons.total())} compared"
            line += f", {undecided} undecided" if undecided else ""
            yield printable(line + "".join(f", {count} {reason}" for reason, count in reasons.most_common()))

    def _lines(self, chosen: Callable[[Change], bool]) -> list[str]:
        return [
            printable(f"  {test}: {change.text}")
            for test, found in self._found.items()
            for change in _changes(found)
            if chosen(change)
        ]


def number_of_rows(count: int) -> str:
    """So many rows, in words."""
    return f"{count} row{'s' * (count != 1)}"


def _changes(found: dict[str, Compared]) -> list[Change]:
    return [change for changes in found.values() if not isinstance(changes, str) for change in changes]
