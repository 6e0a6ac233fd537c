"""The screen that ends a run: the machine, the verdict, what was found, where the rows are, and last what failed.

It has at most `LINES` lines without -v, which adds every answer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from shardmark.report.answers import NO_ANSWER, NOT_MEASURED
from shardmark.report.findings import findings, undecided, verdict
from shardmark.report.outcomes import first_line
from shardmark.report.questions import OTHERS
from shardmark.report.summary import Summary
from shardmark.text import cut, number_of, printable
from shardmark.verdict.betting import UNDECIDED

LEAST, MOST = 80, 120
"""Characters of a line: the terminal's width, within these limits."""

LINES, AROUND = 40, 3
"""Most lines of a run's end, and those of them that are around the screen: the rule above it, pytest's last line and
the page's path."""

FOUND, FOUND_WITH_FAILURES, LEAST_FOR_FAILURES = 8, 3, 12
"""Most findings; fewer leave room for what failed, which has so many lines at least."""

MISSED_SHOWN = 3
"""Missed goals that are shown; the others are counted."""

Style = dict[str, Any]
Styled = tuple[str, Style]
PLAIN: Style = {}
RED, YELLOW, BOLD = ({color: True} for color in ("red", "yellow", "bold"))


def screen_lines(summary: Summary, width: int, files: Sequence[Styled] = (), verbose: bool = False) -> list[Styled]:
    """(line, colours), at most `width` characters a line; `files` are the lines that say where the rows are.

    Failures come last and whole: as many as have room, at least one, then the number of the others. `verbose` shows
    them all, every test that is undecided, every missed goal and every answer.
    """
    lines = [*_head(summary, width), *_goals(summary, width, verbose)]
    end = [("", PLAIN), *_counted(summary, width, verbose), *files]
    failures = LEAST_FOR_FAILURES if summary.outcomes.failed else 0
    lines += _found(summary, width, None if verbose else LINES - AROUND - len(lines) - len(end) - failures)
    if verbose:
        lines += [*_undecided_tests(summary, width), *_answers(summary, width)]
    lines += end
    return [*lines, *_failures(summary, width, None if verbose else LINES - AROUND - len(lines))]


def _head(summary: Summary, width: int) -> Iterator[Styled]:
    yield from _wrapped(verdict(summary), width, style=BOLD | (RED if summary.outcomes.failed else PLAIN))
    yield from _wrapped(summary.where(), width)
    yield from _wrapped(summary.what(), width)
    for said in filter(None, (summary.busy(), summary.throttled())):
        yield from _wrapped(said, width, style=YELLOW)


def _goals(summary: Summary, width: int, verbose: bool) -> Iterator[Styled]:
    if goals := summary.goals():
        yield from _wrapped(goals, width)
        missed = list(summary.missed())
        shown = missed if verbose else missed[:MISSED_SHOWN]
        for name, why in shown:
            name = name if verbose else cut(printable(name), max(20, width - len(printable(why)) - 6))
            yield from _wrapped(f"{name}: {why}", width, "  ")
        if len(missed) > len(shown):
            yield f"  and {len(missed) - len(shown)} more", PLAIN


def _found(summary: Summary, width: int, room: int | None) -> list[Styled]:
    """The findings, as many as `room` lines have room for; where there are few, answers of other measured questions."""
    most = FOUND_WITH_FAILURES if summary.outcomes.failed else FOUND
    found = findings(summary, most)
    said = [each.sentence for each in found]
    shown, without = {each.question for each in found}, (NO_ANSWER, NOT_MEASURED)
    for text, entries, answer in summary.questions.answers(summary.entries, summary.outcomes):
        if entries and (text or OTHERS) not in shown and not answer.startswith(without):
            said.append(f"{text or OTHERS.capitalize() + ':'} {answer}")
    lines: list[Styled] = []
    for sentence in said[:most]:
        more = [*_wrapped(sentence, width, "- ")]
        if room is None or 1 + len(lines) + len(more) <= room:
            lines += more
    return [("", PLAIN), *lines] if lines else []


def _undecided_tests(summary: Summary, width: int) -> Iterator[Styled]:
    for test, why in summary.outcomes.undecided.items():
        yield from _wrapped(f"{UNDECIDED}: {summary.name(test)}: {first_line(why)}", width, style=YELLOW)


def _answers(summary: Summary, width: int) -> Iterator[Styled]:
    for text, _, answer in summary.questions.answers(summary.entries, summary.outcomes):
        yield "", PLAIN
        yield from _wrapped(text or OTHERS, width, style=BOLD)
        yield from _wrapped(answer, width, "  ")


def _counted(summary: Summary, width: int, verbose: bool) -> Iterator[Styled]:
    """The number of questions that are undecided or not measured, in one line, and how to see all."""
    count = len(undecided(summary))
    are = f"{number_of(count, 'question')} {'is' if count == 1 else 'are'} undecided or not measured"
    shows = "" if verbose else "-v shows all answers and the tables"
    if text := "; ".join(filter(None, (are if count else "", shows))):
        yield from _wrapped(text, width)


def _failures(summary: Summary, width: int, room: int | None) -> Iterator[Styled]:
    failed = summary.outcomes.failed
    shown: list[Styled] = []
    count = 0
    for test, why in failed.items():
        lines = [*_wrapped(summary.name(test), width, style=RED | BOLD), *_wrapped(first_line(why), width, "  ", RED)]
        if room is not None and count and len(shown) + len(lines) > room - 3:
            break
        shown += lines
        count += 1
    if failed:
        yield "", PLAIN
        yield f"failed: {len(failed)}", RED | BOLD
        yield from shown
    if len(failed) > count:
        yield f"and {len(failed) - count} more, which -v shows", RED


def _wrapped(text: str, width: int, start: str = "", style: Style = PLAIN) -> Iterator[Styled]:
    """The text in lines of that width, indented after the first."""
    indent = " " * max(len(start), 2)
    lines = textwrap.wrap(printable(text), width, initial_indent=start, subsequent_indent=indent)
    return ((line, style) for line in lines)
