"""The answer to a question in a sentence: who is fastest, who needs least memory, and what the intervals leave open."""

from collections.abc import Sequence

import pytest

from shardmark.report.answers import answered, fastest, fastest_and_smallest, goals, most, saves
from shardmark.report.ranking import Span, fastest_of, implementation, relative_times
from shardmark.report.words import figure, share, where
from shardmark.rows.columns import Entry
from tests.support.entries import entry

MIB = 2**20

PEER = entry("eager", 1.0, tensors=100 * MIB)
QUICK = entry("quick", 0.5, ("eager", 0.45, 0.5, 0.55), tensors=50 * MIB)
SLIM = entry("slim", 0.8, ("eager", 0.75, 0.8, 0.85), tensors=8 * MIB)
ALIKE = entry("alike", 0.52, ("eager", 0.47, 0.52, 0.57), tensors=60 * MIB)
OPEN = entry("open", 1.0, ("eager", 0.9, 1.0, 1.1), tensors=MIB)


def answer(*entries: Entry) -> str:
    return answered(entries, fastest_and_smallest)


def test_the_fastest_stands_beside_its_peer_and_then_whose_peak_is_smallest() -> None:
    slim = "Quick is fastest with 0.50 of the time of eager; slim needs least memory, 0.08 of that of eager."
    assert answer(PEER, QUICK, SLIM) == slim
    both = "Quick is fastest with 0.50 of the time of eager; it needs least memory, 0.50 of that of eager."
    assert answer(PEER, QUICK) == both


def test_those_whose_intervals_overlap_share_the_first_place() -> None:
    took = "quick takes 0.50 of the time of eager"
    assert answered([PEER, QUICK, ALIKE], fastest) == f"Quick or alike is fastest: {took}."
    third = entry("third", 0.54, ("eager", 0.49, 0.54, 0.6))
    assert answered([PEER, QUICK, ALIKE, third], fastest) == f"Quick or one of 2 others is fastest: {took}."


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        pytest.param((0.6, 1.1), "which is faster is undecided", id="around_1"),
        pytest.param((0.0, 0.0), "the ratio of their times has no interval", id="of_too_few_rounds"),
    ],
)
def test_a_ratio_that_may_be_1_is_undecided(ends: tuple[float, float], why: str) -> None:
    open_ratio = entry("quick", 0.8, ("eager", ends[0], 0.8, ends[1]), error=0.1)
    took = "quick takes 0.80 of the time of eager"
    beside = f"Which is fastest is undecided: {took}, and the intervals of all overlap."
    assert answered([PEER, open_ratio], fastest) == beside
    assert answered([open_ratio], fastest) == f"{took.capitalize()}; {why}."


def test_a_ratio_of_too_few_rounds_does_not_take_the_first_place_of_one_that_is_known() -> None:
    unsure = entry("unsure", 0.4, ("eager", 0.0, 0.4, 0.0))
    text = answered([PEER, QUICK, SLIM, unsure], fastest)
    assert text == "Quick or unsure is fastest: quick takes 0.50 of the time of eager."


def test_ratios_are_multiplied_along_the_way_to_the_common_peer() -> None:
    """DDP against naive, bucketed against DDP: so bucketed against naive."""
    naive, ddp = entry("naive", 1.0), entry("ddp", 0.8, ("naive", 0.7, 0.8, 0.9))
    flat, bucketed = entry("flat", 0.9, ("naive", 0.85, 0.9, 0.95)), entry("bucketed", 0.7, ("ddp", 0.8, 0.9, 0.95))
    spans = relative_times([naive, flat, bucketed, ddp], ("naps", "naive"))
    assert spans["naps", "bucketed"] == Span(pytest.approx(0.56), pytest.approx(0.72), pytest.approx(0.855))
    assert spans["naps", "naive"] == Span(1, 1, 1)
    first = fastest_of([naive, flat, bucketed, ddp])
    assert implementation(first.entry) == "bucketed" and {*map(implementation, first.rivals)} == {"ddp", "flat"}


def test_times_that_were_not_raced_decide_nothing_beside_a_peer() -> None:
    other = entry("other", 0.1, error=0.001)
    assert not relative_times([PEER, QUICK, other], ("naps", "eager"))["naps", "other"].is_decided


def test_without_a_race_medians_decide_as_far_as_their_errors_let_them() -> None:
    assert (
        answered([entry("a", 1.0, error=0.01), entry("b", 2.0, error=0.01)], fastest) == "A is fastest with 1,000 ms."
    )
    noisy = [entry("a", 1.0, error=0.2), entry("b", 1.2, error=0.2)]
    undecided = "Which is fastest is undecided: a takes 1,000 ms, and the intervals of all overlap."
    assert answered(noisy, fastest) == undecided


def test_what_failed_or_was_not_run_wins_nothing_and_is_counted() -> None:
    wrong = entry("wrong", 0.01, ("eager", 0.009, 0.01, 0.011), tensors=1, verdict="fail")
    raised = entry("raised", 0.02, ("eager", 0.01, 0.02, 0.03), tensors=1)
    giant = entry("giant", None, verdict="not started")
    text = answered([PEER, QUICK, wrong, raised, giant], fastest, failed={raised["fullname"]})
    assert text == "Quick is fastest with 0.50 of the time of eager. Left out: 2 failed, 1 not started."


def test_an_answer_without_data_says_what_is_missing() -> None:
    failed = entry("wrong", verdict="fail")
    assert answer(failed, entry("giant", None, verdict="out of memory")) == "No answer: 1 failed, 1 out of memory."
    assert answered([PEER], goals) == "No answer: its rows do not say."
    assert answered([PEER], lambda entries: f"{1 / 0}") == "No answer: ZeroDivisionError: division by zero."


def test_of_several_cases_it_is_the_one_with_most_work_that_compares_something() -> None:
    def at(case: str, flops: int, *names: str) -> list[Entry]:
        return [entry(name, case=case, work={"flops": flops}, tensors=MIB, error=0.01) for name in names]

    entries = [*at("b1-s16-step", 1, "a", "b"), *at("b1-s64-step", 4, "a", "b"), *at("b1-s99-step", 9, "a")]
    assert answer(*entries).startswith("With s64, which is fastest is undecided: a takes 1,000 ms")
    assert answer(*entries).endswith("all need the same memory, 1.00 MiB.")
    more_ranks = entry("a", 0.5, case="b1-s64-step", ranks=4, work={"flops": 4})
    assert answer(entries[2], more_ranks) == "On 4 ranks, a takes 500 ms."


def test_a_case_and_an_implementation_have_the_words_that_their_row_has() -> None:
    quick = entry("quick", 0.5, ("eager", 0.45, 0.5, 0.55), case="s64")
    eager = entry("eager", case="s64")
    for each, words in ((quick, "the quick nap"), (eager, "an eager nap")):
        each["extra_info"]["case"]["words"] = "at 64 winks"
        each["extra_info"]["called"] = words
    text = "At 64 winks, the quick nap is fastest with 0.50 of the time of an eager nap."
    assert answered([eager, quick], fastest) == text
    quick["extra_info"]["world_size"] = 2
    assert where(quick, [quick, eager]) == "On 2 ranks, at 64 winks"


def test_a_case_that_names_its_implementation_is_one_case_with_the_peers() -> None:
    """As the rungs of a ladder do, whose id begins with the step."""
    eager, compiled = (
        entry("eager", case="s64"),
        entry("compiled", 0.5, ("eager", 0.45, 0.5, 0.55), case="compiled-s64"),
    )
    for each in (eager, compiled):
        each["extra_info"]["case"] |= {"step": implementation(each), "name": "s64"}
    assert "compiled is fastest with 0.50 of the time of eager" in answered([eager, compiled], fastest)


@pytest.mark.parametrize(
    ("entries", "other", "expected"),
    [
        ((PEER, QUICK, SLIM), None, "Slim takes 0.08 of the memory and 0.80 of the time of eager."),
        ((PEER, QUICK, SLIM), "quick", "Slim takes 0.16 of the memory and 1.60 times the time of quick."),
        ((QUICK,), None, "Quick needs least memory, 50.00 MiB."),
        (
            (PEER, OPEN),
            None,
            "Open takes 0.01 of the memory and 1.00 times the time of eager; which is faster is undecided.",
        ),
    ],
    ids=["the_peer", "another", "alone", "undecided"],
)
def test_who_saves_memory_says_at_what_time(entries: Sequence[Entry], other: str | None, expected: str) -> None:
    assert answered(entries, saves(other)) == expected


def test_a_single_implementation_says_its_own_figures() -> None:
    assert answer(PEER) == "Eager takes 1,000 ms; it needs 100.00 MiB."
    alone = answer(entry("a", 0.0051, ("slow", 0.2, 0.25, 0.3), tensors=100))
    assert alone == "A takes 5.1 ms, 0.25 of the time of slow; it needs 100 bytes."


def test_the_most_of_a_figure_and_goals() -> None:
    entries = [entry(name, limit={"fraction": share}) for name, share in (("a", 0.25), ("b", 0.62), ("c", None))]
    reaches = most(lambda entry: entry["extra_info"]["limit"]["fraction"], "{name} reaches {value:.0%}")
    assert answered(entries, reaches) == "B reaches 62%."
    reached, missed = (entry("a", time={"goal": 1.0, "outcome": outcome}) for outcome in ("reached", "missed"))
    assert answered([reached, reached, missed], goals) == "Goals: 2 reached, 1 missed."


@pytest.mark.parametrize(
    ("ratio", "shown"), [(0.7312, "0.73"), (9.94, "9.94"), (12.3, "12"), (0.0371, "0.037"), (1234.5, "1,234")]
)
def test_ratios_have_as_many_digits_as_mean_something(ratio: float, shown: str) -> None:
    assert figure(ratio) == shown
    assert share(ratio, "time") == (f"{shown} of the time" if ratio < 1 else f"{shown} times the time")


def test_a_simulation_says_who_is_predicted_to_hold_least() -> None:
    large, small = entry("large", None, tensors=100 * MIB), entry("small", None, tensors=8 * MIB)
    for each in (large, small):
        each["extra_info"]["simulated"] = True
    least = "Small is predicted to need least memory, 8.00 MiB, 0.08 of the memory of large."
    assert answer(large, small) == least
    assert answer(large) == "Large is predicted to need 100.00 MiB."
    for each, seconds in ((large, 1.0), (small, 2.0)):
        each["stats"] = {"median": seconds, "mean": 9.0}  # a median, as in tables
    assert answer(large, small).startswith("Large is predicted to be fastest, 1,000 ms; small is predicted to need")
