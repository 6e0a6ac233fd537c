"""Times of a case agree with the ratios of its pairs, whatever the machine does between two tests."""

from __future__ import annotations

import random

import pytest

from shardmark.rows.case_times import CaseKey, CaseTimes
from shardmark.verdict.betting import interval, paired_ratios

CASE = CaseKey("naps", "naps", "short", 1)
STEPS = {"eager": 0.100, "fused": 0.050, "naive": 0.300, "tiled": 0.020}
RACES = {"eager": None, "fused": "eager", "naive": "eager", "tiled": "fused"}


def rounds(name: str, speed: float, draw: random.Random, count: int = 15) -> list[float]:
    """Seconds of noisy rounds, with bursts, on a machine at that speed."""
    return [STEPS[name] / speed * draw.lognormvariate(0, 0.05) * draw.choice((1, 1, 1, 1, 5)) for _ in range(count)]


@pytest.mark.parametrize(
    "order", [[*RACES], ["naive", "fused", "eager", "tiled"], ["fused", "tiled", "naive", "eager"]]
)
def test_the_quotient_of_two_times_is_their_ratio_on_a_machine_that_drifts(order: list[str]) -> None:
    times = CaseTimes()
    draw, stated, ratios = random.Random(7), {}, {}
    for name in order:
        speed, peer = draw.uniform(0.5, 2.0), RACES[name]
        mine = rounds(name, speed, draw)
        theirs = [] if peer is None else rounds(peer, speed, draw)
        pace = times.pace(CASE, name, mine, peer, theirs)
        stated[name] = sorted(mine)[len(mine) // 2] / pace
        if peer is not None:
            ratios[name] = interval(paired_ratios(mine, theirs)).center
    for name, ratio in ratios.items():
        assert stated[name] / stated[str(RACES[name])] == pytest.approx(ratio, rel=1e-9)


def test_a_pair_is_asked_once_and_read_both_ways() -> None:
    times = CaseTimes()
    assert times.ratios(CASE, "fused", "eager") is None
    times.pace(CASE, "fused", [0.5, 1.0], "eager", [1.0, 4.0])
    assert times.ratios(CASE, "fused", "eager") == [0.5, 0.25]
    assert times.ratios(CASE, "eager", "fused") == [2.0, 4.0]
    assert times.ratios(CaseKey("naps", "naps", "long", 1), "fused", "eager") is None


def test_steps_that_take_no_time_have_the_pace_of_1() -> None:
    """A clock may be too coarse for a step."""
    times = CaseTimes()
    assert times.pace(CASE, "fused", [0.0, 0.0], None, []) == 1.0
    assert times.pace(CASE, "tiled", [0.0] * 6, "fused", [0.0] * 6) == 1.0


def test_the_first_pair_is_stated_as_it_was_measured() -> None:
    assert CaseTimes().pace(CASE, "fused", [0.5] * 3, "eager", [1.0] * 3) == pytest.approx(1.0)
    assert CaseTimes().pace(CASE, "fused", [0.5, 0.6, 0.7], None, []) == 1.0
