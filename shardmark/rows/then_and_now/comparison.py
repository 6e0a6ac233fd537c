"""What has come of comparing a run's rows with older ones, and the last lines that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from shardmark.rows.then_and_now.baseline import Change, Compared
from shardmark.text import printable
from shardmark.verdict.betting import FAIL, UNDECIDED

MOST = 10
"""Lines on what is worse, and on what is better; without -v the others are counted."""

WORSE, BETTER = "slower or larger", "faster or smaller"


class Comparison:
    """By test: of its time, memory and counters, what has come of comparing them."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Compared]] = {}

    def add(self, test_id: str, found: dict[str, Compared]) -> list[tuple[str, str]]:
        """Note it; the verdicts, with what to say of those that are not met or not decided."""
        self._found[test_id] = found
        return [(change.verdict, change.text) for each in found.values() for change in changes_in(each)]

    def write(self, terminal: pytest.TerminalReporter, others: Iterator[str]) -> None:
        """How many rows were compared and why some were not, the `others`, and what is worse and what is better."""
        for line in (*self._counts(), *others):
            terminal.write_line(line)
        worse, better = (
            self._lines(chosen) for chosen in (lambda each: each.verdict == FAIL, lambda each: each.better)
        )
        for title, lines, style in ((WORSE, worse, "red"), (BETTER, better, "green")):
            terminal.write_line(f"{title}: {len(lines)}", **{style: bool(lines)})
            shown = lines if terminal.config.option.verbose > 0 else lines[:MOST]
            for line in shown:
                terminal.write_line(line)
            if len(lines) > len(shown):
                terminal.write_line(f"  and {len(lines) - len(shown)} more")

    def _counts(self) -> Iterator[str]:
        for what in ("time", "memory", "counters"):
            yield printable(f"{what}: {counted([found[what] for found in self._found.values()])}")

    def _lines(self, chosen: Callable[[Change], bool]) -> list[str]:
        return [
            printable(f"  {test}: {change.text}")
            for test, found in self._found.items()
            for each in found.values()
            for change in changes_in(each)
            if chosen(change)
        ]


def number_of_rows(count: int) -> str:
    """So many rows, in words."""
    return f"{count} row{'s' * (count != 1)}"


def changes_in(found: Compared) -> Sequence[Change]:
    """What is not as it was; nothing where it was not compared."""
    return () if isinstance(found, str) else found


def counted(found: Sequence[Compared]) -> str:
    """How many rows were compared, how many of those are undecided, and why the others were not."""
    reasons = Counter(each for each in found if isinstance(each, str))
    undecided = sum(change.verdict == UNDECIDED for each in found for change in changes_in(each))
    text = f"{number_of_rows(len(found) - reasons.total())} compared"
    text += f", {undecided} undecided" if undecided else ""
    return text + "".join(f", {count} {reason}" for reason, count in reasons.most_common())
