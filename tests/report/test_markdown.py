"""A run in Markdown: in short first, names as text, no more than a comment holds, and what has changed."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.markdown import COMMENT, inert, markdown
from shardmark.rows.change import Change, RowComparison
from shardmark.rows.columns import Entry
from shardmark.rows.comparison import Compared
from shardmark.rows.reader import RunFileError
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval
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
    lead = "**Slower or larger than old.json: 1 figure; 2 rows compared in time, memory and counters"
    assert text.startswith(f"# What this run says\n\n{lead}")
    slower, smaller = (line for line in text.splitlines() if line.startswith("| test_planted"))
    assert slower.startswith("| test_planted.py::test_row\\[a\\] |") and "step time, beside theirs | 1 | 2" in slower
    place = "| test_planted.py::test_row\\[b\\] | bytes of tensors at the peak "
    assert smaller == f"{place}| 4,000 | 3,000 | -25% |  |"
    folded = "<details><summary>faster or smaller: 1</summary>\n\n| faster or smaller | figure |"
    assert text.index(lead) < text.index(slower) < text.index(folded) < text.index(smaller)
    assert text.index(smaller) < text.index("**1 of 2 tests failed.**")


def change(ratio: float, **more: Any) -> Change:
    """A change of bytes by that factor; with an interval, of time."""
    texts = {"verdict": FAIL if ratio > 1 else PASS, "text": "bytes", "figure": "bytes", **more}
    return Change(**texts, better=ratio < 1, before=1_000_000, now=round(1_000_000 * ratio))


def told(rows: dict[str, RowComparison], *notes: str) -> str:
    """The report of a run that has compared these rows with main."""
    return markdown([("this run", run(entry("eager")))], compared=[Compared("main (1a2b3c4d5e)", rows, notes)])


def test_what_is_worse_comes_first_the_largest_first_then_accepted_undecided_and_folded_better() -> None:
    slow = Interval(1.2, 1.1, 1.3, 0.99)
    unsure = Interval(1.02, 0.98, 1.07, 0.99)
    rows: dict[str, RowComparison] = {
        "p/test_a.py::a": {"time": [change(1.02, verdict=UNDECIDED, interval=unsure)], "memory": [change(0.5)]},
        "p/test_a.py::b": {"time": [change(1.2, interval=slow, figure="step | time")], "memory": [change(1.00025)]},
        "p/test_a.py::c": {"time": "without a peer", "memory": [change(1.5, verdict=PASS, accepted="a @mask")]},
        "p/test_a.py::d": {"time": [Change(PASS, "")], "memory": [change(2.0, grown=("3 more: aten::mul, a.py:12",))]},
    }
    text = told({test: {**row, "counters": "not counted"} for test, row in rows.items()}, "a note")
    lead = "Slower or larger than main (1a2b3c4d5e): 3 figures; 4 rows compared in memory, 3 in time, none in counters"
    lines = [
        f"**{lead}; 1 figure accepted; 1 figure undecided.**",
        "| slower or larger | figure | before | now | change | interval |",
        "| test_a.py::d | bytes | 1,000,000 | 2,000,000 | +100% |  |",
        "| test_a.py::b | step \\| time | 1,000,000 | 1,200,000 | +20% | +10% to +30% |",
        "| test_a.py::b | bytes | 1,000,000 | 1,000,250 | +0.025% |  |",
        "- test_a.py::d: 3 more: aten::mul, a.py:12",
        "| accepted | figure | before | now | change | interval | why |",
        "| test_a.py::c | bytes | 1,000,000 | 1,500,000 | +50% |  | a @\u200bmask |",
        "| undecided | figure | before | now | change | interval |",
        "| test_a.py::a | bytes | 1,000,000 | 1,020,000 | +2% | -2% to +7% |",
        "<details><summary>faster or smaller: 1</summary>",
        "| test_a.py::a | bytes | 1,000,000 | 500,000 | -50% |  |",
        "</details>",
        "- Counters: 0 rows compared, 4 not counted.",
        "- a note",
    ]
    shown = text.splitlines()
    places = [shown.index(line) for line in lines]
    assert places == sorted(places)


def test_a_green_report_says_what_it_was_compared_with_and_which_slowdowns_are_left() -> None:
    def row(*shares: float) -> RowComparison:
        times = [Change(PASS, "", not_excluded=share) for share in shares]
        return {"time": times, "memory": [Change(PASS, "")], "counters": [Change(PASS, "")]}

    text = told({"a": row(0.08, 0.3), "b": row(0.06), "c": row(0.005)})
    compared = "3 rows compared in time, memory and counters"
    assert (
        f"**Nothing slower or larger than main (1a2b3c4d5e): {compared}; slowdowns up to 8% are not excluded in 2 r"
        in text
    )
    assert "slowdowns of any size are not excluded in 1 row.**" in told({"a": row(math.inf)})
    assert "not excluded" not in told({"c": row(0.005)})


def test_a_report_says_that_nothing_was_compared() -> None:
    nothing = dict.fromkeys(("time", "memory", "counters"), "that main fails on (ImportError)")
    for rows in ({}, {"a": nothing}):
        assert "**Nothing was compared with main (1a2b3c4d5e).**" in told(rows)
    assert "- Time: 0 rows compared, 1 that main fails on (ImportError)." in told({"a": nothing})


def test_other_collectives_are_shown_by_their_text() -> None:
    text = told({"a": {"time": "", "memory": "", "counters": [Change(FAIL, "other *collectives*")]}})
    assert "| a | other \\*collectives\\* |  |  |  |  |" in text


def test_a_figure_that_was_zero_has_no_percentage() -> None:
    grown = Change(FAIL, "1 synchronizations, 0 in main", figure="synchronizations", before=0, now=1)
    text = told({"a": {"time": "", "memory": "", "counters": [grown]}})
    assert "| a | synchronizations | 0 | 1 | from 0 |  |" in text
