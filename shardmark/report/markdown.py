"""A run as Markdown, for a pull request or a folder of documents: a summary, then the tables, folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardmark.report.changes import OPEN, Changes, changes
from shardmark.report.findings import findings, undecided, verdict
from shardmark.report.outcomes import first_line
from shardmark.report.summary import Summary
from shardmark.report.tables import render
from shardmark.rows.change import BETTER, WORSE
from shardmark.rows.columns import Entry
from shardmark.rows.reader import of_this_version
from shardmark.text import printable

MOST = 20
"""Lines shown of a list; the others are counted."""

COMMENT = 65_536
"""Most characters of a comment on GitHub."""

NO_ROOM = "\n{} of {} tables are left out: a comment has no room for them.\n"


def markdown(runs: Sequence[tuple[str, Entry]], most: int | None = None) -> str:
    """The last of these (file name, run) pairs, and what has changed since the others.

    `most` limits the characters: the summary is whole, and tables without room are left out and counted. Raises
    RunFileError, in one line, where a run was written by another version of this suite.
    """
    *others, (name, run) = runs
    compared = [of_this_version(changes, before, older, run, before) for before, older in others]
    short, tables = of_this_version(_parts, name, run, compared)
    room = None if most is None else most - len(short) - len(NO_ROOM)
    shown: list[str] = []
    for table in tables:
        if room is not None and sum(map(len, shown)) + len(table) > room:
            break
        shown.append(table)
    text = short + "".join(shown)
    if len(shown) < len(tables):
        text += NO_ROOM.format(len(tables) - len(shown), len(tables))
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(run: Entry, compared: Sequence[Changes]) -> tuple[str, list[str]]:
    """The summary, and each table folded: parts that may be left out."""
    summary = Summary.of(run)
    return _joined(_in_short(summary, compared)), [
        _joined(["", f"<details><summary>{inert(title)}</summary>", "", *_fenced(lines), "", "</details>"])
        for title, lines in render(summary.entries, summary.questions)
    ]


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _in_short(summary: Summary, compared: Sequence[Changes]) -> Iterator[str]:
    outcomes = summary.outcomes
    yield "# What this run says"
    when = f"  \nMeasured on {inert(summary.date)}." if summary.date else ""
    yield from ("", f"**{inert(verdict(summary))}**")
    yield from ("", f"{inert(summary.where())}  ", f"{inert(summary.what())}{when}")
    if busy := summary.busy():
        yield from ("", f"{busy.capitalize()}.")
    yield from _listed("Failed", outcomes.failed, summary)
    yield from _listed("Undecided", outcomes.undecided, summary)
    for each in compared:
        yield from _compared(each)
    if goals := summary.goals():
        yield from ("", f"## {goals.capitalize()}")
        missed = list(summary.missed())
        if missed:
            yield from ("", *_table(["missed", "by"], missed[:MOST]), *_rest(len(missed)))
    if found := findings(summary):
        yield from ("", "## Findings", "", *(f"- {inert(each.sentence)}" for each in found))
    if open_questions := undecided(summary):
        yield from ("", "## Undecided or not measured", "", *(f"- {inert(each)}" for each in open_questions))
    answers = list(summary.questions.answers(summary.entries, outcomes))
    names = [summary.questions.name(text) for text, *_ in answers]
    yield from ("", "## Answers", "")
    yield from _table(["question", "answer"], [(name, said) for name, (*_, said) in zip(names, answers, strict=True)])
    yield from ("", "## Tables")


def _listed(title: str, tests: dict[str, str], summary: Summary) -> Iterator[str]:
    if tests:
        named = [(summary.name(test), first_line(why)) for test, why in tests.items()]
        yield from ("", f"## {title}: {len(tests)}", "", *_table(["test", "why"], named[:MOST]), *_rest(len(named)))


def _compared(changes: Changes) -> Iterator[str]:
    """Rows that are worse, undecided and better than in another run, and the number of rows compared."""
    counts = ", ".join(f"{changes.of(outcome)} {outcome}" for outcome in (WORSE, OPEN, BETTER))
    yield from ("", f"## Against {inert(changes.name)}: {counts}", "")
    yield from (f"- {inert(count)}" for count in changes.counts)
    for outcome in (WORSE, OPEN, BETTER):
        rows = [(test.rpartition("/")[2], kind, said) for found, test, kind, said in changes.rows if found == outcome]
        if rows:
            yield from ("", *_table([outcome, "of", ""], rows[:MOST]), *_rest(len(rows)))


def _rest(count: int) -> list[str]:
    return ["", f"and {count - MOST} more"] if count > MOST else []


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(map(inert, row))} |"


def _fenced(lines: Sequence[str]) -> list[str]:
    """A code block, whose fence is longer than any run of backticks in it."""
    text = [printable(line) for line in lines]
    fence = "`" * max([3, *(len(run) + 1 for line in text for run in re.findall("`+", line))])
    return [fence, *text, fence]


def inert(text: str) -> str:
    """Escape a text from a user's file: no markup, no link, no mention of an account."""
    text = printable(escape(text, quote=False))
    text = re.sub(r"([\\`*|\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return re.sub(r"(@|://|(?<!\w)www)", "\\1\N{ZERO WIDTH SPACE}", text)
