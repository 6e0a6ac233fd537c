"""Budgets: intervals that hold what they say, verdicts that noise does not decide, and the file of a team's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardmark.budget import (
    FAIL,
    PASS,
    SMALLEST_EFFECT,
    UNDECIDED,
    AbsoluteBudget,
    BudgetFileError,
    Interval,
    MemoryBudget,
    combined,
    confidence,
    fewest_rounds,
    median_interval,
    paired_ratios,
    read_budgets,
    verdicts,
)
from shardmark.registry import Race


@pytest.mark.parametrize(
    ("n", "k", "coverage"),
    [(6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375), (15, 4, 0.96484375), (20, 6, 0.958610534667969)],
)
def test_interval_is_the_tabulated_one(n: int, k: int, coverage: float) -> None:
    """Conover's table: for n samples, the k-th from each end."""
    interval = median_interval(random.sample(range(1, n + 1), n))
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.coverage == pytest.approx(coverage)
    assert interval.median == (n + 1) / 2


@pytest.mark.parametrize("n", [7, 15, 40])
def test_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    """The samples are skewed and have outliers; the tolerance is 3 standard deviations of 2,000 draws."""
    generator = random.Random(n)
    draws = 2000
    true_median = 0.6931471805599453  # of an exponential distribution
    intervals = [median_interval([generator.expovariate(1) for _ in range(n)]) for _ in range(draws)]
    held = sum(i.low <= true_median <= i.high for i in intervals) / draws
    coverage = intervals[0].coverage
    assert coverage >= 0.95
    assert abs(held - coverage) < 3 * (coverage * (1 - coverage) / draws) ** 0.5


@pytest.mark.parametrize(("asked", "fewest"), [(0.95, 6), (0.96875, 6), (0.97, 7), (0.9999, 15)])
def test_the_fewest_rounds_reach_the_confidence(asked: float, fewest: int) -> None:
    assert fewest_rounds(asked) == fewest
    assert median_interval(range(fewest), asked).coverage >= asked
    assert median_interval(range(fewest - 1), asked).coverage < asked


def test_too_few_samples_decide_nothing() -> None:
    interval = median_interval([1.0, 1.0, 1.0, 1.0, 1.0])
    assert interval.coverage == pytest.approx(0.9375)
    assert interval.verdict(2.0) == interval.verdict(0.5) == UNDECIDED
    assert median_interval(range(2000)).median == 999.5  # as many as no float holds the combinations of
    assert median_interval([1.0]).coverage == 0
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


@pytest.mark.parametrize(
    ("budget", "verdict"), [(1.2, PASS), (1.1, PASS), (1.0, UNDECIDED), (0.9, UNDECIDED), (0.89, FAIL)]
)
def test_the_whole_interval_decides(budget: float, verdict: str) -> None:
    assert Interval(1.0, 0.9, 1.1, 0.96, 0.95).verdict(budget) == verdict
    assert Interval(1.0, 0.9, 1.1, 0.96, 0.97).verdict(budget) == UNDECIDED


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_neither_fails_nor_passes(seed: int) -> None:
    """Equal implementations with 20% noise and a drift of the machine: 1.0x may be undecided, 0.5x and 2x are not."""
    generator = random.Random(seed)
    rounds = [(1 + i / 10, generator.gauss(1, 0.2), generator.gauss(1, 0.2)) for i in range(15)]
    ratios = paired_ratios([d * max(a, 0.2) for d, a, _ in rounds], [d * max(b, 0.2) for d, _, b in rounds])
    assert median_interval(ratios).verdict(2.0) == PASS
    assert median_interval(ratios).verdict(0.5) == FAIL


def test_only_an_effect_that_matters_fails_a_budget() -> None:
    """A ratio to a peer may be over its limit by SMALLEST_EFFECT; a limit in seconds holds as it stands."""

    def verdict_of(ratio: float, seconds: float) -> list[str]:
        interval = median_interval([ratio] * 20, confidence(1))
        own = [AbsoluteBudget("*", seconds=1.0)]
        found = verdicts([], [], [seconds] * 20, interval, Race("peer", budget=1.0), None, own, confidence(1))
        return [verdict for verdict, _ in found]

    assert verdict_of(1 + SMALLEST_EFFECT, 1.0) == [PASS, PASS]
    assert verdict_of(1.001 + SMALLEST_EFFECT, 1.001) == [FAIL, FAIL]


def test_pairs_cancel_the_drift_of_the_machine() -> None:
    drift = [1.0, 10.0, 100.0]
    assert paired_ratios([2 * d for d in drift], drift) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 1.0])


def test_a_memory_budget_is_the_formula_times_its_slack() -> None:
    budget = MemoryBudget(formula=1000, slack=1.05)
    assert budget.bytes == 1050
    assert budget.verdict(1050) == PASS and budget.verdict(1051) == FAIL


def test_one_failure_fails_the_row() -> None:
    assert combined([PASS, UNDECIDED, FAIL]) == FAIL
    assert combined([PASS, UNDECIDED]) == UNDECIDED
    assert combined([PASS, PASS]) == PASS
    assert combined([]) is None


def test_patterns_take_brackets_as_they_are() -> None:
    budget = AbsoluteBudget("perf/test_attention.py::test_attention[flash*-both]")
    assert budget.matches("perf/test_attention.py::test_attention[flash_pytorch-b4-both]")
    assert not budget.matches("perf/test_attention.py::test_attention[eager-b4-both]")
    assert not budget.matches("perf/test_attention.py::test_attentionf")
    assert AbsoluteBudget("*[case?]").matches("x[case1]")


def test_a_budget_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "budgets.toml"
    file.write_text('["*eager*"]\nseconds = 0.5\n["*flash*"]\nbytes = 1_000\n')
    assert read_budgets(file) == [AbsoluteBudget("*eager*", seconds=0.5), AbsoluteBudget("*flash*", bytes=1000)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["*"]\nminutes = 1', "takes `seconds` and `bytes`, and nothing else"),
        ('["*"]', "takes `seconds` and `bytes`"),
        ("seconds = 1", "takes `seconds` and `bytes`"),
        ('["*"]\nseconds = "fast"', "seconds = 'fast' is not a positive number"),
        ('["*"]\nbytes = -1', "bytes = -1 is not a positive number"),
        ('["*"]\nbytes = true', "bytes = True is not a positive number"),
        ("[", "is not TOML"),
    ],
)
def test_a_wrong_budget_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "budgets.toml"
    file.write_text(text)
    with pytest.raises(BudgetFileError) as caught:
        read_budgets(file)
    assert message in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(BudgetFileError, match=r"missing\.toml: No such file"):
        read_budgets(tmp_path / "missing.toml")


@pytest.mark.parametrize(("peaks", "expected"), [([1000, 1010], PASS), ([1000, 1011, 1000], FAIL), ([1000], PASS)])
def test_ranks_that_hold_different_peaks_fail_the_row(peaks: list[int], expected: str) -> None:
    within, alike = verdicts(peaks, peaks, [1.0], None, None, MemoryBudget(formula=2000), [], 0.95)
    assert (within[0], alike[0]) == (PASS, expected)
    assert "further apart than 1%" in alike[1]
