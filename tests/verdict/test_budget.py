"""Budgets and their verdicts, and the file of a team's own budgets."""

from pathlib import Path

import pytest

from shardmark.api.registry import Race
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, interval
from shardmark.verdict.budget import (
    SMALLEST_EFFECT,
    AbsoluteBudget,
    BudgetFileError,
    MemoryBudget,
    combined,
    confidence,
    read_budgets,
    verdicts,
)


def test_only_an_effect_that_matters_fails_a_budget() -> None:
    """A ratio to a peer may exceed its limit by SMALLEST_EFFECT; a limit in seconds is exact."""

    def verdict_of(ratio: float, seconds: float) -> list[str]:
        found_ratio = interval([ratio] * 200, confidence(1))
        own = [AbsoluteBudget("*", seconds=1.0)]
        found = verdicts([], [], [seconds] * 200, found_ratio, Race("peer", budget=1.0), None, own, confidence(1))
        return [verdict for verdict, _ in found]

    assert verdict_of(0.999 + SMALLEST_EFFECT, 0.999) == [PASS, PASS]
    assert verdict_of(1.001 + SMALLEST_EFFECT, 1.001) == [FAIL, FAIL]


def test_beside_a_process_on_the_ranks_cores_a_time_budget_does_not_fail_and_a_memory_budget_does() -> None:
    """`naive` on two ranks and two cores, beside a busy process: one message a parameter, and DDP's is one."""

    def found(ratio: float, waited: float) -> list[str]:
        memory, race = MemoryBudget(formula=1000, slack=1.0), Race("ddp", budget=10.0)
        judged = interval([ratio] * 200, confidence(1))
        return [verdict for verdict, _ in verdicts([1001] * 2, [1001] * 2, [], judged, race, memory, [], 0.95, waited)]

    assert found(13.3, 0.0) == [FAIL, PASS, FAIL]
    assert found(13.3, 0.77) == [FAIL, PASS, UNDECIDED]
    assert found(1.6, 0.77) == [FAIL, PASS, PASS]


def test_a_memory_budget_is_the_formula_times_its_slack() -> None:
    budget = MemoryBudget(formula=1000, slack=1.05)
    assert budget.bytes == 1050
    assert budget.verdict(1050) == PASS and budget.verdict(1051) == FAIL


@pytest.mark.parametrize("source", ["formula", "prediction"])
def test_a_failed_memory_budget_says_where_it_is_from(source: str) -> None:
    budget = MemoryBudget(formula=1000, slack=1.0, source=source)
    verdict, why = next(verdicts([1001], [1001], [], None, None, budget, [], 0.95))
    assert verdict == FAIL and why.endswith(f"over the budget of 1,000 bytes ({source} 1,000 bytes x 1.0)")


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
    assert AbsoluteBudget("*a" * 50 + "b").matches("a" * 5000) is False  # in milliseconds


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


@pytest.mark.parametrize(("peaks", "expected"), [([1000, 1010], PASS), ([1000, 1011, 1000], FAIL), ([1000], PASS)])
def test_ranks_that_hold_different_peaks_fail_the_row(peaks: list[int], expected: str) -> None:
    within, alike = verdicts(peaks, peaks, [1.0], None, None, MemoryBudget(formula=2000), [], 0.95)
    assert (within[0], alike[0]) == (PASS, expected)
    assert "further apart than 1%" in alike[1]


def test_ranks_that_need_not_hold_as_much_may_differ() -> None:
    budget = MemoryBudget(formula=2000, alike=False)
    assert [verdict for verdict, _ in verdicts([10, 1900], [10, 1900], [1.0], None, None, budget, [], 0.95)] == [PASS]
