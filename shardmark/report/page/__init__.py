"""The page: one file that loads nothing, in light and dark, at any width; JavaScript only sorts and filters."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

from shardmark.report.changes import changes
from shardmark.report.outcomes import first_line
from shardmark.report.page.figure import Figure
from shardmark.report.page.predicted import COLUMNS, strategies
from shardmark.report.page.section import Section, Table, as_link, section
from shardmark.report.page.two_runs import beside, is_predicted, ratios
from shardmark.report.page.vega import draw
from shardmark.report.questions import OTHERS, Questions
from shardmark.report.summary import Summary
from shardmark.report.tables import case, question, together
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of, of_this_version
from shardmark.text import printable

FOLDER = Path(__file__).parent
HALF = 690
"""Pixels: a wider plot gets the full width of the page, or its text would be too small."""


def page(runs: Sequence[tuple[str, Entry]]) -> str:
    """The page of the last of these (file name, run) pairs, and what changed since each of the others.

    Raises RunFileError, in one line, where a run was written by another version of this suite.
    """
    from jinja2 import Environment, FileSystemLoader  # comes with torch; only a page needs it
    from markupsafe import Markup

    named = [(printable(name), _clean(run)) for name, run in runs]
    last = named[-1][1]
    alike = [(name, run) for name, run in named[:-1] if is_predicted(run) == is_predicted(last)]
    compared = [of_this_version(changes, name, run, last, name) for name, run in alike]
    predictions = [
        (name, of_this_version(beside, name, *((run, last) if is_predicted(run) else (last, run))))
        for name, run in named[:-1]
        if (name, run) not in alike
    ]
    sections = of_this_version(_sections, *named[-1])
    summary: Summary = of_this_version(Summary.of, *named[-1])
    numbers = count()

    def svg(figure: Figure) -> dict[str, Any]:
        drawn, width = draw(figure.chart, f"plot-{next(numbers)}", figure.title, _described(figure), figure.names)
        return {"svg": Markup(drawn), "whole": width > HALF}

    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html").render(
        machines=[(name, _machine(run)) for name, run in named],
        name=named[-1][0],
        summary=summary,
        answers=_answers(summary),
        asked=[each.title for each in sections],
        first_line=first_line,
        compared=[(each, ratios(each)) for each in compared],
        predictions=predictions,
        fits=of_this_version(strategies, named[-1][0], last["benchmarks"]),
        fits_columns=COLUMNS,
        sections=sections,
        svg=svg,
        as_link=as_link,
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return text.encode("utf-8", "backslashreplace").decode()


def _clean(value: Any) -> Any:
    """A copy whose texts are printable, without the list of each round's time."""
    if value is None or isinstance(value, int | float):  # nearly all there is
        return value
    if isinstance(value, str):
        return value if value.isprintable() else "\n".join(map(printable, value.split("\n")))
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items() if key != "data"}
    return value


def _sections(run: Entry) -> list[Section]:
    """One section for each question with rows, in the order of the run; then one for each derived answer."""
    questions = {each["text"]: each for each in run.get("questions", [])}
    device_bytes = run["machine_info"].get("device_bytes")
    measured = [
        section(text or OTHERS, together(list(entries), case), questions.get(text, {}), device_bytes)
        for text, entries in groupby(together(entries_of(run), question), key=question)
    ]
    derived = Questions.of(questions.values()).derivations(entries_of(run))
    return measured + [Section(text or OTHERS, [], [], Table([], []), lines) for text, lines in derived]


def _machine(run: Entry) -> list[tuple[str, str]]:
    """(name, value) of what is known of the machine and the run."""
    info, commit = run["machine_info"], run.get("commit_info") or {}
    first = entries_of(run)[0]["extra_info"]
    cpu = info.get("cpu") or {}
    found = {
        "GPUs": ", ".join(map(str, info.get("gpus") or [])),
        "driver": info.get("driver"),
        "processor": cpu.get("brand_raw"),
        "cores": info.get("cores"),
        "scheduling": info.get("scheduling"),
        "PyTorch": info.get("torch"),
        "Triton": info.get("triton"),
        "Python": info.get("python_version"),
        "device": info.get("device"),
        "scale": first.get("scale"),
        "link between the ranks": first.get("link"),
        "measured": str(run.get("datetime") or "")[:16].replace("T", " "),
        "commit": str(commit.get("id") or "")[:12],
    }
    return [(name, str(value)) for name, value in found.items() if value]


def _answers(summary: Summary) -> dict[str, str]:
    """The answer to each question, by its text."""
    answers = summary.questions.answers(summary.entries, summary.outcomes)
    return {text or OTHERS: said for text, _, said in answers}


def _described(figure: Figure) -> str:
    """Text for screen readers: what the plot shows, and where its figures are."""
    return f"{len(figure.rows)} figures: {', '.join(figure.columns)}. The table under the plot has all of them."
