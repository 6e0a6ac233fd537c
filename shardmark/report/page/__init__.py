"""The page: one file that loads nothing, in light and dark, at any width, on paper; a second one for published figures.

JavaScript sorts and filters, shows figures on hover, and writes downloads; without it all else is there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from shardmark.report.changes import changes
from shardmark.report.findings import findings, undecided, verdict
from shardmark.report.outcomes import first_line
from shardmark.report.page.errors import is_predicted, prediction_errors
from shardmark.report.page.figure import Anchors, Bars, Dots, Figure
from shardmark.report.page.history import HEIGHT, WIDTH, history
from shardmark.report.page.predicted import COLUMNS, strategies
from shardmark.report.page.published import published
from shardmark.report.page.section import Section, section
from shardmark.report.page.vega import draw
from shardmark.report.questions import OTHERS
from shardmark.report.summary import Summary
from shardmark.report.tables import case, question, together
from shardmark.report.words import figure as ratio_in_words
from shardmark.rows.change import BETTER, WORSE
from shardmark.rows.columns import Entry
from shardmark.rows.reader import entries_of, of_this_version
from shardmark.text import number_of, printable

FOLDER = Path(__file__).parent

Runs = Sequence[tuple[str, Entry]]
"""(file name, run) of each."""


def page(runs: Runs, other: str | None = None) -> str:
    """The page of the last of these runs, what changed since each of the others, and each figure's history.

    `other` is the name of the file with `published_page`, to which it links. Raises RunFileError, in one line, where a
    run was written by another version of this suite.
    """
    named = [(printable(name), _clean(run)) for name, run in runs]
    name, last = named[-1]
    alike = [(each, run) for each, run in named[:-1] if is_predicted(run) == is_predicted(last)]
    compared = [of_this_version(changes, each, run, last, each) for each, run in alike]
    steps = [
        of_this_version(changes, before, older, newer, before)
        for (before, older), (_, newer) in pairwise([*alike, (name, last)])
    ]
    predictions = [
        (each, of_this_version(prediction_errors, each, *((run, last) if is_predicted(run) else (last, run))))
        for each, run in named[:-1]
        if (each, run) not in alike
    ]
    anchors = Anchors()
    summary: Summary = of_this_version(Summary.of, name, last)
    sections = of_this_version(_sections, name, last, anchors)
    answers = _answers(summary)
    places = {each.title: each.anchor for each in sections}
    return _rendered(
        "page.html",
        runs=[each for each, _ in named],
        machines=[(each, _machine(run)) for each, run in named],
        name=name,
        other=other,
        published=[text for text, _ in published(last)] if other else [],
        summary=summary,
        verdict=verdict(summary),
        findings=findings(summary),
        undecided=undecided(summary),
        places=places,
        answers=answers,
        derived=[(text or OTHERS, lines) for text, lines in summary.questions.derivations(summary.entries)],
        first_line=first_line,
        compared=compared,
        history=of_this_version(history, name, [*alike, (name, last)], steps) if alike else [],
        small_size=(WIDTH, HEIGHT),
        predictions=predictions,
        fits=of_this_version(strategies, name, last["benchmarks"]),
        fits_columns=COLUMNS,
        sections=sections,
        anchors=anchors,
    )


def published_page(run: tuple[str, Entry], other: str) -> str | None:
    """The page of figures that others have published, beside this run's; None where the run's questions name none.

    `other` is the name of the file with the run's own page.
    """
    name, clean = printable(run[0]), _clean(run[1])
    found = of_this_version(lambda each: list(published(each)), name, clean)
    return _rendered("published.html", name=name, other=other, found=found, anchors=Anchors()) if found else None


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader  # comes with torch; only a page needs it
    from markupsafe import Markup

    def svg(figure: Figure, anchor: str) -> list[dict[str, Any]]:
        """The figure's panels: a heading and an SVG of each."""
        return [
            {
                "heading": heading,
                "svg": Markup(
                    draw(panel, f"{anchor}.{place}", _title(figure, heading), _described(figure), figure.names)
                ),
            }
            for place, (heading, panel) in enumerate(figure.panels)
        ]

    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.tests |= {"dots": lambda plot: isinstance(plot, Dots), "bars": lambda plot: isinstance(plot, Bars)}
    environment.filters["ratio"] = ratio_in_words
    environment.globals |= {
        "number_of": number_of,
        "worse": WORSE,
        "better": BETTER,
        "svg": svg,
        "style": Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return environment.get_template(template).render(**values).encode("utf-8", "backslashreplace").decode()


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


def _sections(run: Entry, anchors: Anchors) -> list[Section]:
    """One section for each question with rows, in the order of the run."""
    questions: Mapping[str | None, Any] = {each["text"]: each for each in run.get("questions", [])}
    device_bytes = run["machine_info"].get("device_bytes")
    return [
        section(text, together(list(entries), case), questions.get(text, {}), device_bytes, anchors)
        for text, entries in groupby(together(entries_of(run), question), key=question)
    ]


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


def _title(figure: Figure, heading: str) -> str:
    return f"{figure.title}: {heading}" if heading else figure.title


def _described(figure: Figure) -> str:
    """Text for screen readers: what the plot shows, and where its figures are."""
    return f"{len(figure.rows)} figures: {', '.join(figure.columns)}. The table under the plot has all of them."
