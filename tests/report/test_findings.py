"""Findings: decided comparisons in sentences whose figures are the rows', the most telling first."""

from collections.abc import Sequence
from typing import Any

import pytest

from shardmark.report.findings import findings, undecided, verdict
from shardmark.report.outcomes import Outcomes
from shardmark.report.questions import Questions
from shardmark.report.summary import Summary
from shardmark.report.words import share
from shardmark.rows.columns import Entry
from tests.support.entries import entry
from tests.support.whole_run import whole_run

MIB = 2**20
EAGER = entry("eager", 1.0, tensors=100 * MIB)


def summary(entries: Sequence[Entry], failed: Sequence[Entry] = (), questions: Questions | None = None) -> Summary:
    outcomes = Outcomes(failed={each["fullname"]: "boom" for each in failed})
    outcomes.passed = {each["fullname"] for each in entries} - outcomes.failed.keys()
    return Summary([*entries], questions or Questions(), outcomes, {})


def sentences(*entries: Entry, failed: Sequence[Entry] = ()) -> list[str]:
    return [each.sentence for each in findings(summary(entries, failed))]


def asking(question: str, *entries: Entry) -> list[Entry]:
    return [{**each, "group": question} for each in entries]


@pytest.mark.parametrize(
    ("ratio", "ends", "tensors", "said"),
    [
        (0.5, (0.45, 0.55), 8, "Quick takes 0.50 of the time and 0.08 of the memory of eager."),
        (0.5, (0.45, 0.55), 100, "Quick takes 0.50 of the time of eager, in the same memory."),
        (0.5, (0.45, 0.55), 97, "Quick takes 0.50 of the time of eager, in about the same memory."),
        (1.5, (1.4, 1.6), 30, "Quick takes 1.50 times the time and 0.30 of the memory of eager."),
        (0.9, (0.8, 1.1), 30, "Quick takes 0.30 of the memory of eager; which is faster is undecided."),
        (0.9, None, 30, "Quick takes 0.30 of the memory of eager; the ratio of their times has no interval."),
        (0.97, (0.96, 0.98), 30, "Quick takes 0.30 of the memory of eager, in about the same time."),
        (0.97, (0.96, 0.98), 100, None),
        (0.9, (0.8, 1.1), 97, None),
        (0.5, None, 100, None),
    ],
)
def test_only_what_is_decided_is_a_finding(
    ratio: float, ends: tuple[float, float] | None, tensors: int, said: str | None
) -> None:
    low, high = ends or (0.0, 0.0)
    quick = entry("quick", ratio, ("eager", low, ratio, high), tensors=tensors * MIB)
    assert sentences(EAGER, quick) == ([] if said is None else [said])


def test_what_failed_is_no_finding() -> None:
    quick = entry("quick", 0.5, ("eager", 0.45, 0.5, 0.55), tensors=8 * MIB)
    assert sentences(EAGER, quick, failed=[quick]) == sentences(EAGER, {**quick, "stats": None}) == []


def test_where_nothing_saves_it_says_what_the_peer_saves() -> None:
    slow = entry("slow", 2.0, ("eager", 1.9, 2.0, 2.1), tensors=100 * MIB)
    slower = entry("slower", 3.0, ("eager", 2.9, 3.0, 3.1), tensors=100 * MIB)
    assert sentences(EAGER, slow, slower) == ["Slower takes 3.00 times the time of eager, in the same memory."]


def test_the_peer_may_have_no_row() -> None:
    alone = entry("sent_in_bfloat16", 0.5, ("ddp", 0.45, 0.5, 0.55), tensors=MIB, ranks=2)
    (finding,) = findings(summary([alone]))
    assert finding.sentence == "On 2 ranks, sent_in_bfloat16 takes 0.50 of the time of ddp."
    assert finding.bars == (("ddp", 1.0, None), ("sent_in_bfloat16", 0.5, None))


def test_what_was_not_raced_is_compared_in_memory_alone() -> None:
    """Beside the largest, and without a word on which is faster."""
    (said,) = sentences(entry("ddp", 1.0, tensors=100 * MIB), entry("fsdp", 0.9, tensors=40 * MIB))
    assert said == "Fsdp takes 0.40 of the memory of ddp; the ratio of their times has no interval."


def test_each_question_has_one_and_each_family_one_before_any_second() -> None:
    """The second of a family has room where others are few; a comparison that another question made has none."""
    quick = entry("quick", 0.1, ("eager", 0.09, 0.1, 0.11), tensors=MIB)
    again = entry("quick", 0.2, ("eager", 0.19, 0.2, 0.21), tensors=MIB)
    other = entry("other", 0.2, ("eager", 0.19, 0.2, 0.21), tensors=MIB)
    meal = entry("fast", 0.9, ("slow", 0.85, 0.9, 0.95), tensors=MIB, family="meals")
    entries = [
        *asking("A?", EAGER, quick, other),
        *asking("B?", EAGER, again),
        *asking("C?", EAGER, other),
        *asking("D?", entry("slow", tensors=MIB, family="meals"), meal),
    ]
    found = findings(summary(entries))
    assert [each.question for each in found] == ["A?", "C?", "D?"]
    assert [each.question for each in findings(summary(entries), most=2)] == ["A?", "D?"]
    assert [each.weight for each in found] == sorted((each.weight for each in found), reverse=True)


def test_a_picture_has_the_peer_then_the_one_of_the_sentence_then_the_fastest_others() -> None:
    names = {"a": 0.6, "b": 0.9, "c": 0.5, "d": 0.7, "e": 0.8}
    others = [
        entry(name, ratio, ("eager", ratio - 0.01, ratio, ratio + 0.01), tensors=50 * MIB)
        for name, ratio in names.items()
    ]
    (finding,) = findings(summary([EAGER, *others]))
    assert finding.bars[:2] == (("eager", 1.0, 1.0), ("c", 0.5, 0.5))
    assert [name for name, *_ in finding.bars] == ["eager", "c", "a", "d", "e"]


def test_the_figures_of_a_whole_run_are_those_of_its_rows() -> None:
    """Each sentence is of two rows of its question, whose ratio and whose bytes it has, and so have its bars."""
    run = whole_run()
    found = findings(run)
    assert len(found) == 8 and len({each.question for each in found}) == 8
    for finding in found:
        rows = [each["extra_info"] for each in run.entries if each["group"] == finding.question]
        peer, (name, time, memory), *_ = finding.bars
        mine, theirs = (
            next(
                row
                for row in rows
                if row["implementation"] == each and row["case"]["words"] in finding.sentence.lower()
            )
            for each in (name, peer[0])
        )
        assert time == mine["time"]["ratio"] and mine["time"]["peer"] == theirs["implementation"]
        assert memory == mine["memory"]["tensors"] / theirs["memory"]["tensors"]
        low, high = mine["time"]["interval"]
        decided = not low <= 1 <= high
        assert (share(time, "time") in finding.sentence) == decided
        assert decided or "which is faster is undecided" in finding.sentence
        assert (share(memory, "memory") in finding.sentence) == (abs(memory - 1) >= 0.05)


def test_a_derived_answer_is_no_finding_and_not_undecided() -> None:
    questions = Questions()
    questions.state(pytest.mark.question("How much is twice three?", answer="Six.").mark)
    questions["How much is twice three?"].tests = {EAGER["fullname"]}
    run = summary([EAGER], questions=questions)
    assert findings(run) == [] and undecided(run) == []


def test_questions_that_are_undecided_or_not_measured_are_said() -> None:
    questions = Questions()
    questions["On a link?"].tests = {"a test"}
    near = entry("near", 1.0, ("eager", 0.9, 1.0, 1.1), tensors=100 * MIB)
    run = summary([EAGER, near], questions=questions)
    run.outcomes.skipped["a test"] = "needs a link"
    link, nap = undecided(run)
    assert link == "On a link? Not measured: needs a link."
    assert nap.startswith("What does a nap cost? Which is fastest is undecided: ")


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (Outcomes({"a", "b"}), "All 2 tests passed: every budget was met."),
        (Outcomes({"a"}, undecided={"b": "?"}), "No test failed, and 1 of 2 is undecided."),
        (Outcomes({"a"}, {"c": "boom"}, {"b": "?"}), "1 of 3 tests failed."),
        (Outcomes(skipped={"a": "why"}, collected=1), "No test ran to its end."),
        (Outcomes({"a"}, collected=1), "The only test passed: every budget was met."),
        (
            Outcomes({"a"}, collected=2),
            "The run ended before its last test. So far: the only test passed: every budget was met.",
        ),
    ],
)
def test_the_verdict_is_a_sentence(outcomes: Outcomes, said: str) -> None:
    machine: dict[str, Any] = {}
    assert verdict(Summary([], Questions(), outcomes, machine)) == said
