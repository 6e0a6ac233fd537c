"""The end of a run: one screen of 80 columns that says what ran where, what failed, and each question's answer."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.answers import LEGEND
from shardmark.report.markdown import markdown
from shardmark.report.outcomes import Outcomes
from shardmark.report.questions import Questions
from shardmark.report.screen import screen_lines
from shardmark.report.summary import Summary
from shardmark.rows.columns import Entry
from tests.support.entries import entry
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

MACHINE: dict[str, Any] = {"cpu": {"brand_raw": "A processor"}, "cores": 2, "threads": 2, "torch": "2.13.0", "gpus": []}


def screen(entries: list[Entry], outcomes: Outcomes, questions: Questions | None = None, **options: Any) -> list[str]:
    summary = Summary(entries, questions or Questions(), outcomes, MACHINE)
    return [line for line, _ in screen_lines(summary, 80, **options)]


def test_the_screen_says_where_what_failed_goals_and_answers() -> None:
    slow = entry("slow", 4.0, ("eager", 3.9, 4.0, 4.1), verdict="fail")
    reached = {"goal": 0.5, "outcome": "reached", "peer": "eager", "ratio": 0.4}
    missed = {"goal": 0.1, "outcome": "missed", "peer": "eager", "ratio": 0.5}
    quick = entry("quick", 0.5, ("eager", 0.4, 0.5, 0.6), time=missed)
    entries = [entry("eager"), quick, slow, entry("sdpa", 0.4, ("eager", 0.3, 0.4, 0.45), time=reached, ranks=2)]
    tests = [each["fullname"] for each in entries]
    why = "4.000x eager's time, 99.8% interval [3.9, 4.1], against the budget of 2.0x"
    outcomes = Outcomes({tests[0], tests[1]}, {tests[2]: why, "test_a.py::test_b": "assert 1 == 2\nmore"}, {}, {})
    questions = Questions()
    questions.state(pytest.mark.question("What does a nap cost?", short="naps").mark)
    assert screen(entries, outcomes, questions) == [
        "A processor, 2 cores, 2 threads, torch 2.13.0",
        "4 rows at smoke scale on 1 and 2 ranks: 2 passed, 2 failed",
        "",
        "failed: 2",
        "  slow short         4.000x eager's time, 99.8% interval [3.9, 4.1], against ...",
        "  test_a.py::test_b  assert 1 == 2",
        "",
        "goals: 1 reached, 1 missed",
        "  quick short  0.50x eager, goal 0.1",
        "",
        "answers",
        *textwrap.wrap(LEGEND, 80, subsequent_indent="  "),
        "naps  quick 0.50x eager (1 failed)",
        "",
    ]


def test_a_run_with_much_to_say_keeps_to_the_screen_and_counts_the_rest() -> None:
    open_goal = {"goal": 0.1, "outcome": "missed", "peer": "eager", "ratio": 0.5}
    entries = [entry("x" * 60, case=f"{n:03}" + "y" * 60, time=open_goal) for n in range(200)]
    for n, each in enumerate(entries):
        each["group"] = f"What does the question of number {n % 24} ask for?"
    tests = [each["fullname"] for each in entries]
    why = "why " * 100
    outcomes = Outcomes(set(), dict.fromkeys(tests[:50], why), dict.fromkeys(tests[50:90], why), {})
    lines = screen(entries, outcomes)
    assert max(map(len, lines)) == 80 and len(lines) <= 54
    assert {"failed: 50", "  and 42 more", "undecided: 40", "  and 37 more", "  and 197 more"} <= {*lines}
    assert max(map(len, screen(entries, outcomes, verbose=True))) > 400  # nothing is cut


def test_an_answer_has_a_second_line_before_it_is_cut() -> None:
    def shown(answer: str, **options: bool) -> list[str]:
        questions = Questions()
        questions.state(pytest.mark.question("What does a nap cost?", short="naps", answer=lambda _: answer).mark)
        lines = screen([entry("eager")], Outcomes(), questions, **options)
        return lines[next(n for n, line in enumerate(lines) if line.startswith("naps  ")) : -1]

    figure = "0.73x memory"
    assert shown(f"{'word ' * 14}{figure}") == [f"naps  {'word ' * 14}".rstrip(), f"        {figure}"]
    two = shown("word " * 100)
    assert len(two) == 2 and max(map(len, two)) <= 80 and two[1].endswith("...")
    assert len(shown("word " * 100, verbose=True)) > 2  # nothing is cut


def test_that_most_rows_waited_for_a_core_is_said() -> None:
    entries = [entry(f"n{n}", time={"machine": {"waited": 0.5} if n < 4 else {"bursts": 0.5}}) for n in range(9)]
    said = "the machine was busy: {} of {} rows waited for a core"
    assert screen(entries[:8], Outcomes())[2] == said.format(4, 8)
    assert said.format(3, 9) not in screen([*entries[1:], entry("quiet")], Outcomes())  # a third, and no more
    assert said.format(4, 4) in screen([*entries[:4], entry("none", None, verdict="not started")], Outcomes())


def test_a_question_that_was_not_measured_says_why_and_one_without_cases_is_not_asked() -> None:
    questions = Questions()
    reasons = {"On a link?": "needs a link between the ranks", "Goals?": "got empty parameter set for (case)"}
    skipped = {}
    for text, why in reasons.items():
        questions[text].tests = {f"test of {text}"}
        skipped[f"test of {text}"] = why
    questions["Broken?"].tests = {"broken"}
    lines = screen([entry("eager")], Outcomes(set(), {"broken": "boom"}, {}, skipped), questions)
    assert lines[-4:-1] == [
        "On a link?             not measured: needs a link between the ranks",
        "Broken?                no answer: 1 failed",
        "What does a nap cost?  eager 1,000 ms",
    ]


def test_names_reach_the_terminal_as_text() -> None:
    hostile = entry("a\x1b[31m", case="b\x07\n")
    lines = screen([hostile], Outcomes(failed={hostile["fullname"]: "\x1b]0;title\x07"}))
    assert all(line.isprintable() for line in lines) and any("a\\x1b[31m b\\x07\\n" in line for line in lines)


def test_the_tables_are_verboses(project: pytest.Pytester) -> None:
    for options, has_tables in (((), False), (("-q",), False), (("-v",), True)):
        result, _ = run_project(project, "--scale=smoke", "-k", "first_steps and plain", *options)
        output = result.stdout.str()
        assert "How long is the first nap?  plain " in output and "1 row in out.json" in output
        assert ("\ncase " in output) == has_tables
        assert ("-v shows the tables" in output) == (not has_tables)


def test_a_run_that_measures_nothing_has_no_screen(project: pytest.Pytester) -> None:
    result, _ = run_project(project, "--scale=smoke", "-k", "test_dream or elsewhere")
    assert "what this run says" not in result.stdout.str()


def test_what_failed_is_said_once_with_all_that_it_says_in_the_file(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_others="""
        def test_breaks(worlds):
            worlds(2).run(breaks)

        def breaks():
            raise ValueError("no such nap")
        """
    )
    result, output = run_project(project, "--scale=smoke", "--tb=no", "-k", "nap and (plain or greedy) or breaks")
    printed = result.stdout.str()
    assert printed.count("test_breaks") == 1 and "short test summary info" not in printed
    result.stdout.fnmatch_lines(
        [
            "2 rows at smoke scale on 1 rank: 1 passed, 2 failed",
            "failed: 2",
            "  test_others.py::test_breaks  rank ? of 2 raised ValueError: no such nap",
            "  greedy 0.005s                4,000 bytes of tensors at the peak, over the b...",
            "How long is a nap?  plain * ms, * slow*, 4,000 bytes (1 failed)",
            "*2 failed, 1 passed*",
        ]
    )
    failed = output["outcomes"]["failed"]
    greedy, breaks = failed["test_sleeps.py::test_nap[greedy-0.005s]"], failed["test_others.py::test_breaks"]
    assert "what the formula has at the peak" in greedy and "Traceback" in breaks and "rank 1 of 2" in breaks
    assert greedy.startswith(row_of(output, "greedy")["why"])
    (nap,) = [each["answer"] for each in output["questions"] if each["text"] == "How long is a nap?"]
    assert f"How long is a nap?  {nap}"[:80] in printed.splitlines()


def test_asked_for_pytest_lists_what_failed_as_well(project: pytest.Pytester) -> None:
    result, _ = run_project(project, "--scale=smoke", "-rA", "-k", "nap and greedy", "--tb=no")
    result.stdout.fnmatch_lines(["failed: 1", "*short test summary info*", "FAILED test_sleeps.py::test_nap*"])


DERIVED = """
import pytest

@pytest.mark.question("How much is twice three?", short="twice", answer="six", derivation=("2 x 3", "= 6"))
def test_by_adding():
    assert 3 + 3 == SIX
"""


def test_a_derived_answer_stands_with_its_derivation_wherever_answers_do(project: pytest.Pytester) -> None:
    Path("test_derived.py").write_text(f"SIX = 6\n{DERIVED}")
    result, output = run_project(project, "--scale=smoke", "-k", "greedy or adding", "-v")
    result.stdout.fnmatch_lines(["*How much is twice three[?]*", "2 x 3", "= 6", "*answers*", "twice *six"])
    text = markdown([("out.json", output)])
    assert "| twice | six |" in text and "\n2 x 3\n= 6\n" in text


@pytest.mark.parametrize(("six", "choice", "said"), [(7, "adding", "no answer: 1 failed"), (6, "greedy", None)])
def test_it_stands_only_where_its_tests_pass(project: pytest.Pytester, six: int, choice: str, said: str | None) -> None:
    Path("test_derived.py").write_text(f"SIX = {six}\n{DERIVED}")
    result, _ = run_project(project, "--scale=smoke", "-k", f"greedy or {choice}", "-v")
    twice = [line for line in result.stdout.lines if line.startswith("twice ")]
    assert [line.split(maxsplit=1)[1] for line in twice] == ([] if said is None else [said])
    assert ("= 6" in result.stdout.lines) == (said is not None)
