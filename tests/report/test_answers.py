"""The answer to a question in one line: who is fastest and who holds least, and what the intervals leave open."""

from collections.abc import Sequence

import pytest

from shardmark.report.answers import answered, fastest, fastest_and_smallest, goals, most, saves
from shardmark.report.ranking import Span, fastest_of, relative_times, times
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
    assert answer(PEER, QUICK, SLIM) == "quick 0.50x eager; slim 0.08x memory"
    assert answer(PEER, QUICK) == "quick 0.50x eager; 0.50x memory"


def test_those_whose_intervals_overlap_share_the_first_place() -> None:
    assert answer(PEER, QUICK, ALIKE) == "quick or alike 0.50x eager; 0.50x memory"
    third = entry("third", 0.54, ("eager", 0.49, 0.54, 0.6))
    assert answered([PEER, QUICK, ALIKE, third], fastest) == "quick or 2 others 0.50x eager"


@pytest.mark.parametrize("ends", [(0.6, 1.1), (0.0, 0.0)], ids=["around_1", "of_too_few_rounds"])
def test_a_ratio_that_may_be_1_is_undecided(ends: tuple[float, float]) -> None:
    open_ratio = entry("quick", 0.8, ("eager", ends[0], 0.8, ends[1]), error=0.1)
    assert answered([PEER, open_ratio], fastest) == "quick 0.80x eager (undecided)"
    assert answered([open_ratio], fastest) == "quick 0.80x eager (undecided)"


def test_a_ratio_of_too_few_rounds_is_as_sure_as_the_mean_times() -> None:
    slow = entry("eager", 1.839, error=0.01)
    quick = entry("quick", 0.071, ("eager", 0.0, 0.22, 0.0), error=0.002)
    assert answered([slow, quick], fastest) == "quick 0.22x eager"
    near = entry("near", 0.072, ("eager", 0.0, 0.23, 0.0), error=0.002)
    assert answered([slow, quick, near], fastest) == "quick or near 0.22x eager"
    fused, foreach = entry("fused", 0.0049, error=1e-4), entry("foreach", 0.0178, ("fused", 0.0, 3.6, 0.0), error=2e-4)
    assert answered([fused, foreach], fastest) == "fused 4.9 ms"


def test_what_pairs_and_mean_times_do_not_agree_on_is_undecided() -> None:
    """The machine was busy while the peer's own row was measured, or while the pairs were."""
    peer = entry("eager", 1.0, error=0.01)
    for ratio, seconds in ((0.5, 2.0), (2.0, 0.5)):
        other = entry("other", seconds, ("eager", 0.0, ratio, 0.0), error=0.01)
        assert not relative_times([peer, other], ("naps", "eager"))["naps", "other"].is_decided


def test_ratios_are_multiplied_along_the_way_to_the_common_peer() -> None:
    """DDP against naive, bucketed against DDP: so bucketed against naive."""
    naive, ddp = entry("naive", 1.0), entry("ddp", 0.8, ("naive", 0.7, 0.8, 0.9))
    flat, bucketed = entry("flat", 0.9, ("naive", 0.85, 0.9, 0.95)), entry("bucketed", 0.7, ("ddp", 0.8, 0.9, 0.95))
    spans = relative_times([naive, flat, bucketed, ddp], ("naps", "naive"))
    assert spans["naps", "bucketed"] == Span(pytest.approx(0.56), pytest.approx(0.72), pytest.approx(0.855))
    assert spans["naps", "naive"] == Span(1, 1, 1)
    assert str(fastest_of([naive, flat, bucketed, ddp])) == "bucketed or ddp 0.72x naive".replace(
        "or ddp", "or 2 others"
    )


def test_without_a_race_means_decide_as_far_as_their_errors_let_them() -> None:
    assert answered([entry("a", 1.0, error=0.01), entry("b", 2.0, error=0.01)], fastest) == "a 1,000 ms"
    noisy = [entry("a", 1.0, error=0.2), entry("b", 1.2, error=0.2)]
    assert answered(noisy, fastest) == "a 1,000 ms (undecided)"


def test_what_failed_or_was_not_run_wins_nothing_and_is_counted() -> None:
    wrong = entry("wrong", 0.01, ("eager", 0.009, 0.01, 0.011), tensors=1, verdict="fail")
    raised = entry("raised", 0.02, ("eager", 0.01, 0.02, 0.03), tensors=1)
    giant = entry("giant", None, verdict="not started")
    text = answered([PEER, QUICK, wrong, raised, giant], fastest_and_smallest, failed={raised["fullname"]})
    assert text == "quick 0.50x eager; 0.50x memory (2 failed, 1 not started)"


def test_an_answer_without_data_says_what_is_missing() -> None:
    failed = entry("wrong", verdict="fail")
    assert answer(failed, entry("giant", None, verdict="out of memory")) == "no answer: 1 failed, 1 out of memory"
    assert answered([PEER], goals) == "no answer: its rows do not say"
    assert answered([PEER], lambda entries: f"{1 / 0}") == "no answer: ZeroDivisionError: division by zero"


def test_of_several_cases_it_is_the_one_with_most_work_that_compares_something() -> None:
    def at(case: str, flops: int, *names: str) -> list[Entry]:
        return [entry(name, case=case, work={"flops": flops}, tensors=MIB) for name in names]

    entries = [*at("b1-s16-step", 1, "a", "b"), *at("b1-s64-step", 4, "a", "b"), *at("b1-s99-step", 9, "a")]
    assert answer(*entries) == "s64: a 1,000 ms (undecided); all 1.00 MiB"
    more_ranks = entry("a", 0.5, case="b1-s64-step", ranks=4, work={"flops": 4})
    assert answer(entries[2], more_ranks) == "a 500 ms"


@pytest.mark.parametrize(
    ("entries", "other", "expected"),
    [
        ((PEER, QUICK, SLIM), None, "slim 0.08x eager's memory, 0.80x its time"),
        ((PEER, QUICK, SLIM), "quick", "slim 0.16x quick's memory, 1.60x its time"),
        ((PEER, entry("slim", tensors=MIB)), "eager", "slim 0.01x eager's memory, 1.00x its time (undecided)"),
        ((QUICK,), None, "quick smallest, 50.00 MiB"),
        (
            (PEER, entry("open", 1.0, ("eager", 0.9, 1.0, 1.1), tensors=MIB)),
            None,
            "open 0.01x eager's memory, 1.00x its time (undecided)",
        ),
    ],
    ids=["the_peer", "another", "without_a_race", "alone", "undecided"],
)
def test_who_saves_memory_says_at_what_time(entries: Sequence[Entry], other: str | None, expected: str) -> None:
    assert answered(entries, saves(other)) == expected


def test_a_single_implementation_says_its_own_figures() -> None:
    assert answer(PEER) == "eager 1,000 ms, 100.00 MiB"
    assert answer(entry("a", 0.0051, ("slow", 0.2, 0.25, 0.3), tensors=100)) == "a 5.1 ms, 0.25x slow, 100 bytes"


def test_the_most_of_a_figure_and_goals() -> None:
    entries = [entry(name, limit={"fraction": share}) for name, share in (("a", 0.25), ("b", 0.62), ("c", None))]
    reaches = most(lambda entry: entry["extra_info"]["limit"]["fraction"], "{name} reaches {value:.0%}")
    assert answered(entries, reaches) == "b reaches 62%"
    reached = entry("a", time={"goal": 1.0, "outcome": "reached"})
    assert (
        answered([reached, reached, entry("a", time={"goal": 1.0, "outcome": "missed"})], goals)
        == "2 reached, 1 missed"
    )


@pytest.mark.parametrize(
    ("ratio", "shown"), [(0.7312, "0.73x"), (9.94, "9.94x"), (12.3, "12x"), (0.0371, "0.037x"), (1234.5, "1,234x")]
)
def test_ratios_have_as_many_digits_as_mean_something(ratio: float, shown: str) -> None:
    assert times(ratio) == shown


def test_a_simulation_says_who_holds_least() -> None:
    large, small = entry("large", None, tensors=100 * MIB), entry("small", None, tensors=8 * MIB)
    for each in (large, small):
        each["extra_info"]["simulated"] = True
    assert answer(large, small) == "small 8.00 MiB, 0.08x large's, predicted"
    assert answer(large) == "large 100.00 MiB, predicted"
