"""The verdict on a slowdown: by the median, by the mean, and between processes."""

import math
import random

import pytest

from shardmark.verdict.betting import FAIL, PASS, UNDECIDED
from shardmark.verdict.slowdown import EFFECTS, Gate, Pairs, Slowdown, judged, paired, slowdown, stalls

CONFIDENCE = 0.999


def process(
    seed: int, slower: float = 1.0, pairs: int = 60, noise: float = 0.02, shift: float = 0.0, every: int = 0
) -> Pairs:
    """The pairs of a process: steps of a second with noise, `slower` times as long; each process has its own shift, and
    a step in `every` takes three times as long."""
    coin = random.Random(seed)
    shifted = slower * math.exp(coin.gauss(0, shift))
    mine = [shifted * math.exp(coin.gauss(0, noise)) * (3 if every and i % every == 0 else 1) for i in range(pairs)]
    return mine, [math.exp(coin.gauss(0, noise)) for _ in range(pairs)]


def found(processes: int = 3, **options: float) -> Slowdown:
    return slowdown(paired([process(seed, **options) for seed in range(processes)], CONFIDENCE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({}, PASS),
        ({"slower": 1.05, "processes": 6}, FAIL),
        ({"slower": 1.1, "processes": 4}, FAIL),
        ({"slower": 0.9}, PASS),
        ({"slower": 1.1, "processes": 2}, UNDECIDED),
        ({"slower": 1.005}, PASS),
        ({"every": 20}, UNDECIDED),
        ({"every": 20, "pairs": 300}, UNDECIDED),
        ({"every": 20, "pairs": 300, "processes": 6}, FAIL),
        ({"pairs": 20}, UNDECIDED),
        ({"shift": 0.05}, UNDECIDED),
        ({"noise": 0.5}, UNDECIDED),
    ],
    ids=lambda value: "-".join(f"{name}{each}" for name, each in value.items()) if isinstance(value, dict) else value,
)
def test_the_verdict(options: dict[str, float], verdict: str) -> None:
    assert found(**options).verdict() == verdict  # type: ignore[arg-type]


def test_a_pass_excludes_what_is_over_the_largest_slowdown() -> None:
    now = found()
    assert 0 < now.not_excluded < 0.05 and now.verdict(now.not_excluded * 0.9) == UNDECIDED
    assert now.verdict(now.not_excluded) == PASS


@pytest.mark.parametrize("name", EFFECTS)
def test_what_runs_differ_by_fails_beside_the_same_runs_step_alone(name: str) -> None:
    """A ratio to the peer moves by 5% between runs, and one to the load by 20%."""
    for slower, fails in ((1.04, {"ref"}), (1.1, {"ref", "peer"}), (1.3, {"ref", "peer", "load"})):
        exact = slowdown(paired([([slower] * 100, [1.0] * 100)] * 3, 0.99))
        assert (judged(exact, name, 0.05) == FAIL) == (name in fails), slower


def test_equal_steps_of_processes_that_differ_do_not_fail() -> None:
    """Processes differ by 1% (standard deviation), as the worst of those recorded."""
    slow = [
        slowdown(paired([process(9 * run + i, shift=0.01, pairs=34) for i in range(3)], CONFIDENCE))
        for run in range(300)
    ]
    assert sum(each.verdict() == FAIL for each in slow) <= 1


def test_one_process_in_six_may_lie_apart() -> None:
    """Among five, each has to be slower."""
    apart = process(99, slower=1.0)
    for processes, verdict in ((4, UNDECIDED), (7, FAIL)):
        slow = [process(seed, slower=1.1) for seed in range(processes)]
        assert slowdown(paired([*slow, apart], CONFIDENCE)).verdict() == verdict


def test_beside_an_earlier_run_the_uncertainty_of_both_counts() -> None:
    before = paired([process(100 + i) for i in range(3)], CONFIDENCE)
    wide = paired([process(200 + i, pairs=12, noise=0.3) for i in range(3)], CONFIDENCE)
    slow = paired([process(i, slower=1.1) for i in range(3)], CONFIDENCE)
    assert slowdown(slow, before).verdict() == FAIL
    assert slowdown(slow, wide).verdict() == UNDECIDED and slowdown(slow, wide).not_excluded > 0.1
    assert slowdown(slow, slow).verdict() == PASS
    assert slowdown(before, slow).faster and not slowdown(slow, before).faster


def test_a_gate_wants_more_processes_until_each_comparison_is_decided() -> None:
    before = paired([process(100 + i) for i in range(3)], CONFIDENCE)
    gate = Gate((("peer", before), ("load", before)))
    slow = process(1, slower=1.1, pairs=200)
    assert not gate.decided({"peer": paired([process(1, pairs=20)], CONFIDENCE)})
    assert gate.decided({"peer": paired([process(1, pairs=200)], CONFIDENCE)})
    assert not gate.decided({"peer": paired([slow], CONFIDENCE)})  # to be confirmed
    assert gate.decided({"peer": paired([slow, slow, slow], CONFIDENCE)})


def test_the_runs_own_process_shows_large_slowdowns_alone() -> None:
    before = paired([process(100 + i) for i in range(3)], CONFIDENCE, fresh=False)
    for slower, verdict in ((1.0, UNDECIDED), (1.1, UNDECIDED), (1.4, FAIL)):
        now = paired([process(i, slower=slower) for i in range(3)], CONFIDENCE, fresh=False)
        assert slowdown(now, before).verdict() == verdict
    assert 0.2 < slowdown(before, before).not_excluded < 0.3


def test_stalls_are_named_where_the_other_has_none() -> None:
    even = [1.0] * 100
    stalled = [3.0 if i % 20 == 0 else 1.0 for i in range(100)]
    assert stalls(stalled, even) == "1 step in 20 takes 3.0x"
    assert stalls(stalled, stalled) == "" and stalls(even, stalled) == "" and stalls(even, even) == ""
