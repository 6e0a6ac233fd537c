"""The end of a run: one screen of 80 columns with the verdict, the findings, and last what failed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.markdown import markdown
from shardmark.report.outcomes import Outcomes
from shardmark.report.questions import Questions
from shardmark.report.screen import screen_lines
from shardmark.report.summary import Summary
from shardmark.rows.columns import Entry
from tests.support.entries import entry
from tests.support.project import row_of, run_project
from tests.support.whole_run import MACHINE, whole_run

pytest_plugins = ["pytester", "tests.support.project"]


def screen(summary: Summary, **options: Any) -> list[str]:
    return [line for line, _ in screen_lines(summary, 80, [("4 rows in out.json", {})], **options)]


def run_of(entries: list[Entry], outcomes: Outcomes, questions: Questions | None = None) -> Summary:
    return Summary(entries, questions or Questions(), outcomes, MACHINE)


def test_the_screen_says_the_verdict_what_was_found_and_last_what_failed() -> None:
    slow = entry("slow", 4.0, ("eager", 3.9, 4.0, 4.1), verdict="fail")
    reached = {"goal": 0.5, "outcome": "reached", "peer": "eager", "ratio": 0.4}
    missed = {"goal": 0.1, "outcome": "missed", "peer": "eager", "ratio": 0.5}
    quick = entry("quick", 0.5, ("eager", 0.4, 0.5, 0.6), time=missed, tensors=2**20)
    entries = [entry("eager", tensors=2**20), quick, slow]
    entries.append(entry("sdpa", 0.4, ("eager", 0.3, 0.4, 0.45), time=reached, ranks=2))
    tests = [each["fullname"] for each in entries]
    why = "4.000x eager's time, 99.8% interval [3.9, 4.1], against the budget of 2.0x; and much more"
    outcomes = Outcomes({tests[0], tests[1]}, {tests[2]: why, "test_a.py::test_b": "assert 1 == 2\nmore"})
    questions = Questions()
    questions["On a link?"].tests = {"a test"}
    outcomes.skipped["a test"] = "needs a link"
    assert screen(run_of(entries, outcomes, questions)) == [
        "2 of 4 tests failed.",
        "A processor, 2 cores, 2 threads, torch 2.13.0",
        "4 rows at smoke scale on 1 and 2 ranks: 2 passed, 2 failed, 1 skipped",
        "goals: 1 reached, 1 missed",
        "  quick short: 0.50 of the time of eager, goal 0.1",
        "",
        "- Quick takes 0.50 of the time of eager, in the same memory.",
        "",
        "1 question is undecided or not measured; -v shows all answers and the tables",
        "4 rows in out.json",
        "",
        "failed: 2",
        "slow short",
        "  4.000x eager's time, 99.8% interval [3.9, 4.1], against the budget of 2.0x;",
        "  and much more",
        "test_a.py::test_b",
        "  assert 1 == 2",
    ]


@pytest.mark.parametrize("failed", [0, 1, 2, 50, 150])
def test_the_end_of_a_run_of_200_rows_has_at_most_40_lines_of_80_columns(failed: int) -> None:
    """With the rule above it, pytest's last line and the page's path, and as many failures whole as have room."""
    lines = screen(whole_run(failed))
    assert max(map(len, lines)) <= 80 and len(lines) + 3 <= 40
    whole = lines.count("  " + " ".join(["why"] * 19))
    each = 3  # lines: a name and two of the reason
    assert whole == failed or len(lines) + 3 + each > 40
    assert whole >= min(failed, 3)
    assert (lines[-1] == f"and {failed - whole} more, which -v shows") == (failed > whole)
    findings = sum(line.startswith("- ") for line in lines)
    assert findings == (3 if failed else 8)


@pytest.mark.parametrize("failed", [0, 3])
def test_long_names_do_not_lengthen_the_end(failed: int) -> None:
    run = whole_run(failed)
    for each in run.entries:
        row = each["extra_info"]
        row["called"] = f"{row['implementation']} {'of a long name ' * 30}"
        row["case"] |= {"words": "at length " * 60, "id": f"{row['case']['id']}{'-part' * 60}"}
        row["time"] |= {"peer_called": "a peer " * 60}
    lines = screen(run)
    assert max(map(len, lines)) <= 80 and len(lines) + 3 <= (40 if not failed else 60)
    assert any(line.startswith("- ") for line in lines) and any("goal" in line for line in lines)


def test_the_machine_is_named_as_far_as_it_is_known() -> None:
    one = Summary([entry("a")], Questions(), Outcomes(), {"cores": 1, "threads": 1, "torch": "2.13.0"})
    assert one.where() == "a processor without a name, 1 core, 1 thread, torch 2.13.0"
    unknown = Summary([entry("a")], Questions(), Outcomes(), {"torch": "2.13.0"})
    assert unknown.where() == "a processor without a name, torch 2.13.0"


def test_a_failure_is_whole_however_long() -> None:
    lines = screen(whole_run(2, why=f"{'word ' * 800}end"))
    assert lines[-2].endswith(" end") and lines[-1] == "and 1 more, which -v shows"


def test_verbose_shows_every_failure_goal_and_answer() -> None:
    run = whole_run(150, missed=9)
    run.outcomes.undecided["test_0.py::test_cost[slim-long]"] = "between the budgets"
    lines = screen(run, verbose=True)
    assert sum(line == "  " + " ".join(["why"] * 19) for line in lines) == 150
    assert sum("goal" in line for line in lines) == 1 + 9
    assert {entry["group"] for entry in run.entries} <= {
        *lines
    } and "undecided: slim long: between the budgets" in lines
    assert not any("-v shows" in line for line in lines)


def test_findings_leave_room_for_answers_where_they_are_few() -> None:
    questions = Questions()
    for text, said in (("How long is a nap?", "Plain takes 5 ms."), ("Is six right?", "Not measured: no.")):
        questions.state(pytest.mark.question(text, answer=lambda _, said=said: said).mark)
    entries = [{**entry("plain"), "group": "How long is a nap?"}, {**entry("plain"), "group": "Is six right?"}]
    lines = screen(run_of(entries, Outcomes({"a"}), questions))
    assert [line for line in lines if line.startswith("- ")] == ["- How long is a nap? Plain takes 5 ms."]


def test_that_most_rows_waited_for_a_core_is_said() -> None:
    entries = [entry(f"n{n}", time={"machine": {"waited": 0.5} if n < 4 else {"bursts": 0.5}}) for n in range(9)]
    said = "the machine was busy: {} of {} rows waited for a core"
    assert screen(run_of(entries[:8], Outcomes()))[3] == said.format(4, 8)
    assert said.format(3, 9) not in screen(run_of([*entries[1:], entry("quiet")], Outcomes()))  # a third, and no more
    untimed = entry("none", None, verdict="not started")
    assert said.format(4, 4) in screen(run_of([*entries[:4], untimed], Outcomes()))


def test_rows_whose_gpu_was_throttled_are_named() -> None:
    machine = {"power": 0.6, "waited": 0.06}
    rows = [entry("hot", time={"machine": machine}), entry("n1", time={"machine": {"heat": 0.2}}), entry("cool")]
    text = " ".join(" ".join(screen(run_of(rows, Outcomes()))).split())
    said = f"GPUs were throttled: hot {rows[0]['extra_info']['case']['id']}: the power limit lowered the GPU's clocks"
    assert f"{said} for 60% of the time; and 1 other row" in text
    assert "throttled" not in " ".join(screen(run_of(rows[2:], Outcomes())))


def test_a_question_that_was_not_measured_says_why_and_one_without_cases_is_not_asked() -> None:
    questions = Questions()
    reasons = {"On a link?": "needs a link between the ranks", "Goals?": "got empty parameter set for (case)"}
    skipped = {}
    for text, why in reasons.items():
        questions[text].tests = {f"test of {text}"}
        skipped[f"test of {text}"] = why
    questions["Broken?"].tests = {"broken"}
    lines = screen(run_of([entry("eager")], Outcomes(set(), {"broken": "boom"}, {}, skipped), questions), verbose=True)
    asked = lines.index("On a link?")
    assert lines[asked : asked + 7] == [
        *("On a link?", "  Not measured: needs a link between the ranks.", ""),
        *("Broken?", "  No answer: 1 failed.", ""),
        "What does a nap cost?",
    ]
    assert "Goals?" not in lines


def test_names_reach_the_terminal_as_text() -> None:
    hostile = entry("a\x1b[31m", case="b\x07\n")
    lines = screen(run_of([hostile], Outcomes(failed={hostile["fullname"]: "\x1b]0;title\x07"})))
    assert all(line.isprintable() for line in lines) and any("a\\x1b[31m b\\x07\\n" in line for line in lines)


def test_the_tables_are_verboses(project: pytest.Pytester) -> None:
    for options, has_tables in (((), False), (("-q",), False), (("-v",), True)):
        result, _ = run_project(project, "--scale=smoke", "-k", "first_steps and plain", *options)
        output = result.stdout.str()
        assert "- How long is the first nap? Plain takes " in output and "1 row in out.json" in output
        assert ("\ncase " in output) == has_tables
        assert ("-v shows all answers and the tables" in output) == (not has_tables)


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
            "2 of 3 tests failed.",
            "2 rows at smoke scale on 1 rank: 1 passed, 2 failed",
            "2 rows in out.json",
            "failed: 2",
            "test_others.py::test_breaks",
            "  rank ? of 2 raised ValueError: no such nap",
            "greedy 0.005s",
            "  4,000 bytes of tensors at the peak, over the b*",
            "*2 failed, 1 passed*",
        ]
    )
    failed = output["outcomes"]["failed"]
    greedy, breaks = failed["test_sleeps.py::test_nap[greedy-0.005s]"], failed["test_others.py::test_breaks"]
    assert "what the formula has at the peak" in greedy and "Traceback" in breaks and "rank 1 of 2" in breaks
    assert greedy.startswith(row_of(output, "greedy")["why"])
    (nap,) = [each["answer"] for each in output["questions"] if each["text"] == "How long is a nap?"]
    assert nap.endswith("4,000 bytes. Left out: 1 failed.")


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
    result.stdout.fnmatch_lines(["*How much is twice three[?]*", "2 x 3", "= 6", "How much is twice three[?]", "  six"])
    text = markdown([("out.json", output)])
    assert "| twice | six |" in text and "\n2 x 3\n= 6\n" in text


@pytest.mark.parametrize(("six", "choice", "said"), [(7, "adding", "No answer: 1 failed."), (6, "greedy", None)])
def test_it_stands_only_where_its_tests_pass(project: pytest.Pytester, six: int, choice: str, said: str | None) -> None:
    Path("test_derived.py").write_text(f"SIX = {six}\n{DERIVED}")
    result, _ = run_project(project, "--scale=smoke", "-k", f"greedy or {choice}", "-v")
    lines = result.stdout.lines
    asked = [after for line, after in pairwise(lines) if line == "How much is twice three?"]
    assert asked == ([] if said is None else [f"  {said}"])
    assert ("= 6" in result.stdout.lines) == (said is not None)
