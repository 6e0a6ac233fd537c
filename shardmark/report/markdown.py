"""A run as Markdown, for a pull request or a folder of documents: the verdict on what has changed, a summary, and the
tables, folded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardmark.report.changes import OPEN, Changes, Figure, changes, changes_of
from shardmark.report.findings import findings, undecided, verdict
from shardmark.report.outcomes import first_line
from shardmark.report.summary import Summary
from shardmark.report.tables import render
from shardmark.rows.change import ACCEPTED, BETTER, WORSE
from shardmark.rows.columns import Entry
from shardmark.rows.comparison import Compared
from shardmark.rows.reader import of_this_version
from shardmark.text import printable

MOST = 20
"""Lines shown of a list; the others are counted."""

COMMENT = 65_536
"""Most characters of a comment on GitHub."""

NO_ROOM = "\n{} of {} tables are left out: a comment has no room for them.\n"


def markdown(
    runs: Sequence[tuple[str, Entry]], most: int | None = None, compared: Sequence[Compared] | None = None
) -> str:
    """The last of these (file name, run) pairs, and what has changed since the others; or, if it is the run that is
    ending, what it has compared.

    `most` limits the characters: the summary is whole, and tables without room are left out and counted. Raises
    RunFileError, in one line, where a run was written by another version of this suite.
    """
    *others, (name, run) = runs
    if compared is None:
        found = [of_this_version(changes, before, older, run, before) for before, older in others]
    else:
        found = [changes_of(each) for each in compared]
    short, tables = of_this_version(_parts, name, run, found)
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
    for each in compared:
        yield from _compared(each)
    when = f"  \nMeasured on {inert(summary.date)}." if summary.date else ""
    yield from ("", f"**{inert(verdict(summary))}**")
    yield from ("", f"{inert(summary.where())}  ", f"{inert(summary.what())}{when}")
    for said in filter(None, (summary.busy(), summary.throttled())):
        yield from ("", inert(f"{said[0].upper()}{said[1:]}."))
    yield from _listed("Failed", outcomes.failed, summary)
    yield from _listed("Undecided", outcomes.undecided, summary)
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
    """The verdict on a run beside another one; its figures, the worse ones first; and how many rows were compared."""
    yield from ("", f"**{inert(changes.sentence())}**")
    for outcome in (WORSE, ACCEPTED, OPEN, BETTER):
        figures = [each for each in changes.figures if each.change.outcome == outcome]
        figures.sort(key=lambda each: each.change.ratio, reverse=outcome != BETTER)
        if not figures:
            continue
        names = [outcome, "figure", "before", "now", "change", "interval", *(["why"] if outcome == ACCEPTED else [])]
        table = ["", *_table(names, map(_cells, figures[:MOST])), *_rest(len(figures))]
        grown = [f"- {inert(f'{_short(each)}: {part}')}" for each in figures[:MOST] for part in each.change.grown]
        table += ["", *grown] if grown else []
        if outcome == BETTER:
            table = ["", f"<details><summary>{outcome}: {len(figures)}</summary>", *table, "", "</details>"]
        yield from table
    yield from ("", *(f"- {inert(count)}" for count in changes.counts))


def _short(figure: Figure) -> str:
    return figure.test.rpartition("/")[2]


def _cells(figure: Figure) -> list[str]:
    """The figure's cells; one without numbers has its text in place of them."""
    change, ends = figure.change, ""
    if change.interval is not None:
        known = change.interval.ends
        ends = "too few rounds" if known is None else " to ".join(map(_percent, known))
    elif change.now is None:
        return [_short(figure), change.text, *[""] * 4, *([change.accepted] if change.accepted else [])]
    numbers = ["" if each is None else _number(each) for each in (change.before, change.now)]
    grew = "from 0" if math.isinf(change.ratio) else _percent(change.ratio)
    return [_short(figure), change.figure, *numbers, grew, ends, *([change.accepted] if change.accepted else [])]


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _percent(ratio: float) -> str:
    """As in "+2.5%"; as many digits as a small change needs."""
    percent = 100 * (ratio - 1)
    return f"{percent:+,.0f}%" if abs(percent) >= 100 else f"{percent:+.3g}%"


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
