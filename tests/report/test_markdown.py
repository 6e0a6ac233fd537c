"""A run in Markdown: in short first, names as text, no more than a comment holds, and what has changed."""

import copy
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.markdown import COMMENT, inert, markdown
from shardmark.rows.columns import Entry
from shardmark.rows.reader import RunFileError
from tests.support.entries import entry
from tests.support.planted_rows import figures
from tests.support.planted_rows import planted as planted
from tests.support.planted_rows import run as play

pytest_plugins = ["pytester"]

MACHINE: dict[str, Any] = {
    **{"cpu": {"brand_raw": "A processor"}, "device": "cpu", "gpus": [], "cores": 2, "threads": 2},
    **{"torch": "2.13.0", "node": "a-host"},
}


def run(*entries: Entry, **more: Any) -> Entry:
    return {"machine_info": MACHINE, "benchmarks": list(entries), "unmeasured": [], **more}


def test_it_says_the_machine_what_failed_goals_and_answers_before_the_tables() -> None:
    wrong = entry("wrong", verdict="fail")
    wrong["extra_info"]["why"] = "2 MiB of tensors at the peak"
    own = {"goal": 0.5, "outcome": "reached", "machine": {"waited": 0.5}}
    reached = entry("quick", 0.5, ("eager", 0.4, 0.5, 0.6), time=own, tensors=2**20)
    quiet = entry("eager", time={"machine": {"waited": 0.06}}, tensors=2**20)
    text = markdown([("out.json", run(quiet, reached, wrong, datetime="2026-11-22T10:00"))])
    parts = [
        "# What this run says",
        "**The file has rows alone, and no tests' ends. So far: 1 of 3 tests failed.**",
        "A processor, 2 cores, 2 threads, torch 2.13.0  ",
        "Measured on 2026-11-22.",
        "The machine was busy: 2 of 3 rows waited for a core.",
        "## Failed: 1",
        "| wrong short | 2 MiB of tensors at the peak |",
        "## Goals: 1 reached",
        "## Findings",
        "- Quick takes 0.50 of the time of eager, in the same memory.",
        "## Answers\n\n| question",
        "| What does a nap cost? | Quick is fastest with 0.50 of the time of eager; all need the same memory",
        "<details><summary>What does a nap cost?</summary>",
        "case   implementation ",
        "</details>",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "a-host" not in text


HOSTILE = "<img src=x onerror=a()> | `b` *c* [d](https://e.example) @everyone _f_ flash_pytorch &amp; \x1b[31m ```"


def test_names_are_text() -> None:
    """No markup, no link, no second cell, no mention of an account."""
    shown = inert(HOSTILE)
    assert "<" not in shown and "\x1b" not in shown and "://e" not in shown and "@everyone" not in shown
    assert r"\|" in shown and r"\`b\`" in shown and r"\*c\*" in shown and r"\[d\]" in shown and r"\_f\_" in shown
    assert "flash_pytorch" in shown and "&amp;amp;" in shown
    each = entry(HOSTILE, case=HOSTILE)
    each["group"] = HOSTILE
    text = markdown([("out.json", run(each))])
    table = text[text.index("<details>") :].splitlines()
    assert table.count("````") == 2  # its fence is longer than what is in it
    assert text[: text.index("````")].count("<") == 3  # of details, and of summary and its end


def test_tables_have_the_room_that_a_comment_has() -> None:
    entries = [entry(f"implementation_{n}", case=f"case-{n}") for n in range(2000)]
    for n, each in enumerate(entries):
        each["group"] = f"Question {n % 100}?"
    whole, part = (markdown([("out.json", run(*entries))], most) for most in (None, COMMENT))
    assert len(part) <= COMMENT < len(whole) and whole.count("<details>") == 100
    left_out = 100 - part.count("<details>")
    assert part.endswith(f"{left_out} of 100 tables are left out: a comment has no room for them.\n")


def test_a_run_that_ended_early_and_one_of_another_version() -> None:
    """The first has rows and no answers; the second is one line."""
    assert "No answer" not in markdown([("out.json", run(entry("eager")))])
    for spoil in ("stats", "extra_info"):
        spoilt = copy.deepcopy(entry("eager"))
        spoilt[spoil] = {"mean": 1.0} if spoil == "stats" else {"family": "naps"}
        with pytest.raises(RunFileError, match=r"^old.json is of another version of this suite \(KeyError: '\w+'\)$"):
            markdown([("old.json", run(spoilt))])


def test_a_run_writes_it_and_with_against_what_has_changed(planted: pytest.Pytester) -> None:
    play(planted, "--benchmark-json=old.json", a=figures(), b=figures())
    result = play(planted, "--report=out.md", "--against=old.json", a=figures(ratio=2.0), b=figures(tensors=3000))
    text = Path("out.md").read_text()
    assert result.outlines[-1] == "out.md"
    assert "| other measurements | Mine takes 1,005 ms, 1.00 times the time of theirs; it needs 3,000" in text
    assert "## Against old.json: 1 slower or larger, 0 undecided, 1 faster or smaller" in text
    slower, smaller = (line for line in text.splitlines() if "::test" in line)
    assert "| time | 2.010x theirs's time" in slower and "1.005x in old.json" in slower
    assert "| memory | 3,000 bytes of tensors at the peak, 4,000 in old.json (-1,000, -25%) |" in smaller
