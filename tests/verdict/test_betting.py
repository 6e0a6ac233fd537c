"""Intervals hold the true ratio at every look, on machines that drift and burst."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval, decided, fewest_rounds, interval, paired_ratios

Machine = Callable[[random.Random], Iterator[float]]


def drifting(generator: random.Random) -> Iterator[float]:
    """Half a percent slower with each step."""
    slowness = 1.0
    while True:
        slowness *= 1.005
        yield slowness * math.exp(generator.gauss(0, 0.02))


def with_a_neighbour(generator: random.Random) -> Iterator[float]:
    """Now and then twice as slow for some ten steps; and spikes of any size."""
    while True:
        busy = generator.random() < 0.3
        for _ in range(generator.randint(1, 20)):
            spike = generator.paretovariate(1) if generator.random() < 0.05 else 1.0
            yield (2.0 if busy else 1.0) * spike * math.exp(generator.gauss(0, 0.03))


def in_waves(generator: random.Random) -> Iterator[float]:
    """Every second step is slow, as if two processes took turns. In a fixed order one side would always be slow."""
    while True:
        yield math.exp(generator.gauss(0, 0.02))
        yield 1.5 * math.exp(generator.gauss(0, 0.02))


MACHINES: list[Machine] = [drifting, with_a_neighbour, in_waves]


def ratios(machine: Machine, pairs: int, seed: int, slower: float = 1.0) -> list[float]:
    """Ratios of steps on that machine to a peer's; a coin decides which of the two comes first."""
    generator = random.Random(seed)
    slots, found = machine(generator), []
    for _ in range(pairs):
        first, second = next(slots), next(slots)
        mine, peers = (first, second) if generator.random() < 0.5 else (second, first)
        found.append(slower * mine / peers)
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_it_holds_the_true_ratio_at_every_look(machine: Machine) -> None:
    """At most 5% of 95% intervals miss it at any of 111 looks; the tolerance is 3 standard deviations of 100 runs."""
    missed, runs = 0, 100
    for seed in range(runs):
        found = ratios(machine, 120, seed)
        missed += any(decided(found[:pairs], 1.0, 0.95) for pairs in range(10, 121))
    assert missed <= 0.05 * runs + 3 * (0.05 * 0.95 * runs) ** 0.5


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("slower", "verdict"), [(0.9, PASS), (1.1, FAIL)])
def test_it_tells_a_true_effect_from_the_machine(machine: Machine, slower: float, verdict: str) -> None:
    """An alternating order would miss the effect, or see one that is not there."""
    found = [interval(ratios(machine, 1000, seed, slower), 1 - 1e-4).verdict(1.0) for seed in range(3)]
    assert found == [verdict] * 3


@pytest.mark.parametrize(("asked", "fewest"), [(0.95, 8), (0.99, 11), (0.999, 14), (1 - 1e-4, 18)])
def test_the_fewest_rounds_have_ends(asked: float, fewest: int) -> None:
    assert fewest_rounds(asked) == fewest
    assert interval([2.0] * fewest, asked).ends is not None
    assert interval([2.0] * (fewest - 1), asked).ends is None


def test_too_few_samples_decide_nothing() -> None:
    found = interval([1.0] * 7)
    assert found.ends is None and found.verdict(2.0) == found.verdict(0.5) == UNDECIDED
    assert found.center == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one sample"):
        interval([])


@pytest.mark.parametrize(
    ("budget", "verdict"), [(1.2, PASS), (1.1, PASS), (1.0, UNDECIDED), (0.9, UNDECIDED), (0.89, FAIL)]
)
def test_the_whole_interval_decides(budget: float, verdict: str) -> None:
    assert Interval(1.0, 0.9, 1.1, 0.95).verdict(budget) == verdict


def test_it_is_of_the_ratio_and_not_of_its_size() -> None:
    """The evidence is equal for the inverse ratio and in any unit."""
    found, undecided = ratios(with_a_neighbour, 100, seed=0), [4.0] * 40 + [0.25] * 40
    for samples in (found, undecided):
        there, back, scaled = (interval(each) for each in (samples, [1 / e for e in samples], [8 * e for e in samples]))
        assert (1 / back.high, 1 / back.low) == pytest.approx((there.low, there.high))
        assert (scaled.low, scaled.high) == pytest.approx((8 * there.low, 8 * there.high))
        assert scaled.center == pytest.approx(8 * there.center)


@pytest.mark.parametrize("ratios", [[2.29, 14.4], [1.0], [0.1, 10.0, 90.0, 3000.0], [1.0, 1.01, 1.02]])
def test_the_inverse_ratios_have_the_inverse_center(ratios: list[float]) -> None:
    """Also of a few that are far apart, as at smoke scale on a busy machine: any value between two of them balances."""
    center, inverse = interval(ratios).center, interval([1 / each for each in ratios]).center
    assert center == pytest.approx(1 / inverse, rel=1e-9)
    assert min(ratios) <= center * (1 + 1e-9) and center <= max(ratios) * (1 + 1e-9)


def test_more_pairs_narrow_it() -> None:
    widths = [(found := interval(ratios(drifting, n, seed=3))).high / found.low for n in (20, 80, 320, 1280)]
    assert widths == sorted(widths, reverse=True) and widths[-1] < 1.02


def test_what_calm_pairs_said_stays_said() -> None:
    """Rough pairs after them take nothing away, unless they say the opposite."""
    calm, rough = [1.05] * 40, [2.0, 0.5] * 200
    before, after = interval(calm), interval(calm + rough)
    assert 1.01 < before.low <= after.low * (1 + 1e-9) and after.high * (1 - 1e-9) <= before.high < 1.09
    assert decided(calm + rough, 1.0, 0.95)


def test_a_slow_beginning_is_outgrown() -> None:
    """The first pairs show that the ratio is over 1.1, and the many after them that it is under."""
    for slow, steady in ((30, 1000), (1100, 6000)):
        assert interval([1.2] * slow).verdict(1.1) == FAIL
        assert interval([1.2] * slow + [1.0] * steady).verdict(1.1) == PASS


def test_what_bets_had_at_different_times_does_not_add_up() -> None:
    """All bets together reached 25 times their start; the sum of each one's best moment is 45 times."""
    assert not decided([2.0] * 7 + [0.5] * 3 + [2.0] * 10, 1.0, 0.95)


@pytest.mark.parametrize("first", [1.0, 1.2])
@pytest.mark.parametrize("then", [1.0, 1.1, 1.2])
@pytest.mark.parametrize("pairs", [4, 10, 40, 400])
def test_decided_is_what_the_interval_says(first: float, then: float, pairs: int) -> None:
    samples = [first] * 100 + [then] * pairs if then != first else [first] * pairs
    found = interval(samples)
    assert found.low <= found.center <= found.high
    for limit in (0.9, 0.995, 1.001, 1.05, 1.095, 1.105, 1.15, 1.199, 1.205, 1.3):
        assert decided(samples, limit, 0.95) == (found.verdict(limit) != UNDECIDED), limit


def test_pairs_cancel_the_drift_of_the_machine() -> None:
    drift = [1.0, 10.0, 100.0]
    assert paired_ratios([2 * d for d in drift], drift) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 1.0])
