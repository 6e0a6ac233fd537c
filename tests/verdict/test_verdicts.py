"""Verdicts of a run: noise decides at most the stated share, and rounds are added until all are decided."""

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch.distributed as dist

from correctness.support.metering import plan_of
from shardmark.api.registry import Implementation, Race, resolve
from shardmark.api.workload import Mark
from shardmark.meter import measure_case as passes
from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, PEER, Measured, Plan, Rounds
from shardmark.plugin import WorldsBySize
from shardmark.rows.fill import step_seconds, time_entry
from shardmark.rows.observers import Observer
from shardmark.verdict import budget
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, fewest_rounds
from shardmark.verdict.budget import FAMILY_WISE_ERROR, Limits, confidence
from tests.support.measured import stand_in

MINE, PEERS = stand_in("mine"), stand_in("peers")


class Drawn:
    """A step whose time is drawn at random."""

    backend = "none"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.implementation = implementation

    def prepare(self) -> None: ...

    def step(self, mark: Mark) -> None: ...


def drawn_times(seed: int, slower: float) -> Iterator[dict[str, float]]:
    """Step times on a machine that drifts: noise of 5%, and one step in 20 takes up to 10 times as long."""
    generator = random.Random(seed)
    drift = 1.0
    while True:
        drift *= math.exp(generator.gauss(0, 0.01))
        spike = min(generator.paretovariate(1), 10.0) if generator.random() < 0.05 else 1.0
        noise = math.exp(generator.gauss(0, 0.05)) * spike
        yield {"mine": 0.05 * drift * noise * slower, "peers": 0.05 * drift * noise}


def judge(plan: Plan, seed: int, slower: float = 1.0) -> tuple[str, int]:
    """The verdict of `measure` on steps `slower` times as long as the peer's, and the number of rounds."""
    times, clock = drawn_times(seed, slower), 0.0

    def timed(plan: Plan, workload: Drawn, step: object, ahead: float = 0.0) -> Laps:
        nonlocal clock
        clock += (seconds := next(times)[workload.implementation.name])
        return Laps(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "timed_step", timed)
        patch.setattr(time, "perf_counter", lambda: clock)
        measured = passes.timed_rounds(plan, Memory(), Drawn(MINE, None, "cpu"))
    assert plan.limits is not None
    _, ratio = time_entry([measured], Race("peers", budget=1.0), plan.limits.confidence)
    assert ratio is not None
    return ratio.verdict(budget.tolerated(1.0)), len(measured.laps[IMPLEMENTATION])


JUDGEMENTS = 10
PLAN = plan_of(
    Drawn,
    MINE,
    peer=PEERS,
    rounds=Rounds(minimum=2, maximum=2, warmups=1),
    limits=Limits(confidence(JUDGEMENTS), ratios=(1.0,)),
    coin=1,
)


@pytest.mark.parametrize("runs", [20, pytest.param(300, marks=pytest.mark.sweep)])
def test_noise_decides_a_verdict_in_at_most_one_run_of_100(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal implementations have a budget of exactly 1.0, so that noise decides every decided verdict."""
    monkeypatch.setattr(budget, "SMALLEST_EFFECT", 0.0)
    wrong = 0
    for run in range(runs):
        verdicts = [judge(replace(PLAN, coin=run), seed=run * JUDGEMENTS + i) for i in range(JUDGEMENTS)]
        wrong += any(verdict != UNDECIDED for verdict, _ in verdicts)
    assert wrong <= FAMILY_WISE_ERROR * runs


@pytest.mark.parametrize(("slower", "verdict"), [(0.5, PASS), (0.9, PASS), (1.1, FAIL), (2.0, FAIL)])
def test_a_difference_is_found(slower: float, verdict: str) -> None:
    """It takes at most 50 s, with 5% of noise, a drift and spikes."""
    assert [judge(replace(PLAN, coin=seed), seed, slower)[0] for seed in range(10)] == [verdict] * 10


def test_rounds_are_added_only_while_undecided() -> None:
    first = fewest_rounds(confidence(JUDGEMENTS))
    assert judge(PLAN, seed=1, slower=100.0) == (FAIL, first)
    verdict, rounds = judge(PLAN, seed=1, slower=1 + budget.SMALLEST_EFFECT)
    assert verdict == UNDECIDED and rounds > 10 * first
    assert len(_laps(replace(PLAN, limits=None))) == 2  # nothing to decide
    assert len(_laps(replace(PLAN, peer=None))) == 2  # nobody to compare with
    seconds = Limits(confidence(JUDGEMENTS), seconds=(1e-9, 100.0))
    assert len(_laps(replace(PLAN, peer=None, limits=seconds))) == first


class WithParts(Observer):
    """Times the step once more as a part."""

    timed: ClassVar[Mapping[str, str]] = {"again": "step"}


def test_the_coin_decides_the_order_and_parts_are_timed_only_in_the_first_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def timed(plan: Plan, workload: Drawn, step: object, ahead: float = 0.0) -> Laps:
        order.append(workload.implementation.name)
        return Laps(1.0)  # undecided until the time is spent

    monkeypatch.setattr(passes, "timed_step", timed)
    monkeypatch.setattr(passes, "PATIENCE", 0.1)
    laps = passes.timed_rounds(replace(PLAN, observers=(WithParts,)), Memory(), Drawn(MINE, None, "cpu")).laps
    first = fewest_rounds(confidence(JUDGEMENTS))
    assert len(laps["again"]) == first < len(laps[IMPLEMENTATION]) == len(laps[PEER])
    added = order[-3 * (len(laps[PEER]) - first) :]
    rounds = set(zip(added[::3], added[1::3], added[2::3], strict=True))
    assert rounds == {("mine", "peers", "mine"), ("peers", "mine", "peers")}  # the first step of each is not timed


def _laps(plan: Plan) -> list[Laps]:
    return passes.timed_rounds(plan, Memory(), Drawn(MINE, None, "cpu")).laps[IMPLEMENTATION]


def test_slow_steps_are_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PATIENCE", 0)
    assert judge(PLAN, seed=1, slower=1 + budget.SMALLEST_EFFECT) == (UNDECIDED, fewest_rounds(confidence(JUDGEMENTS)))


class SlowInTurns(Drawn):
    """The ranks are slow in turns, so that each round has a slow rank but no rank is always slow."""

    backend = "gloo"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        super().__init__(implementation, case, device)
        self.steps = dist.get_rank()

    def step(self, mark: Mark) -> None:
        self.steps += 1
        time.sleep(0.1 if self.implementation.name == "eager" and self.steps % 2 else 0.002)


def measured_in_turns(plan: Plan) -> Measured:
    """The timed rounds of the plan on this rank."""
    return passes.timed_rounds(plan, Memory(), plan.workload(plan.implementation, None, "cpu"))


def test_ranks_decide_together_by_the_slowest_of_each_round(worlds: WorldsBySize) -> None:
    eager, peer = resolve("training_step", "eager"), resolve("training_step", "checkpointed")
    plan = replace(PLAN, workload=SlowInTurns, implementation=eager, peer=peer, world_size=2)
    plan = replace(plan, limits=Limits(confidence(1), ratios=(2.0,)))
    ranks = worlds(2).run(measured_in_turns, plan)
    rounds = {len(laps) for rank in ranks for laps in rank.laps.values()}
    assert rounds == {fewest_rounds(confidence(1))}  # decided at the first look
    assert min(step_seconds(ranks)) >= 0.1 and min(step_seconds(ranks, PEER)) < 0.1
