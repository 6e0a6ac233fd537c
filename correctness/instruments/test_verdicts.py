"""Verdicts of a run: noise decides them at the stated rate at most, and rounds are added until they are decided."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from correctness.support.metering import plan_of, stand_in
from impl.attention import eager_attention
from impl.attention.cases import AttentionCase
from perf.workloads.attention import AttentionPass
from shardmark import budget, passes
from shardmark.budget import FAIL, FAMILY_WISE_ERROR, LOOKS, PASS, UNDECIDED, Limits, confidence, fewest_rounds
from shardmark.clock import Laps
from shardmark.memory import Memory
from shardmark.plan import IMPLEMENTATION, PEER, Mark, Measured, Plan, Rounds
from shardmark.plugin import WorldsBySize
from shardmark.registry import Implementation, Race, resolve
from shardmark.rows import step_seconds, time_entry

MINE, PEERS = stand_in("mine"), stand_in("peers")


class Drawn:
    """A step whose time is drawn."""

    backend = "none"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.implementation = implementation

    def prepare(self) -> None: ...

    def step(self, mark: Mark) -> None: ...


def drawn_times(seed: int, slower: float) -> Iterator[dict[str, float]]:
    """Step times on a machine that drifts: noise of 10%, and one step in 20 may take many times as long."""
    generator = random.Random(seed)
    drift = 1.0
    while True:
        drift *= math.exp(generator.gauss(0, 0.01))
        noise = math.exp(generator.gauss(0, 0.1)) * (generator.paretovariate(1) if generator.random() < 0.05 else 1)
        yield {"mine": drift * noise * slower, "peers": drift * noise}


def judge(plan: Plan, seed: int, slower: float = 1.0) -> tuple[str, int]:
    """The verdict on steps `slower` times as long as the peer's, as `measure` would have it, and its rounds."""
    times = drawn_times(seed, slower)

    def timed(plan: Plan, workload: Drawn, step: object, ahead: float = 0.0) -> Laps:
        return Laps(next(times)[workload.implementation.name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_timed", timed)
        measured = passes._time(plan, Memory(), Drawn(MINE, None, "cpu"))
    assert plan.limits is not None
    _, interval = time_entry([measured], Race("peers", budget=1.0), plan.limits.confidence)
    assert interval is not None
    return interval.verdict(budget.tolerated(1.0)), len(measured.laps[IMPLEMENTATION])


JUDGEMENTS = 10
PLAN = plan_of(
    Drawn,
    MINE,
    peer=PEERS,
    rounds=Rounds(minimum=2, maximum=2, warmups=1),
    limits=Limits(confidence(JUDGEMENTS), ratios=(1.0,)),
)


@pytest.mark.parametrize("runs", [100, pytest.param(300, marks=pytest.mark.sweep)])
def test_noise_decides_a_verdict_in_at_most_one_run_of_20(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal implementations are held to exactly 1.0, so that every verdict that is decided is decided by noise."""
    monkeypatch.setattr(budget, "SMALLEST_EFFECT", 0.0)
    wrong, looks = 0, set()
    for run in range(runs):
        verdicts = [judge(PLAN, seed=run * JUDGEMENTS + i) for i in range(JUDGEMENTS)]
        wrong += any(verdict != UNDECIDED for verdict, _ in verdicts)
        looks |= {rounds for _, rounds in verdicts}
    first = fewest_rounds(confidence(JUDGEMENTS))
    assert looks <= {first * 2**look for look in range(LOOKS)} and max(looks) == first * 2 ** (LOOKS - 1)
    assert wrong <= FAMILY_WISE_ERROR * runs


@pytest.mark.parametrize(("slower", "verdict"), [(0.5, PASS), (1.0, PASS), (1.2, FAIL), (2.0, FAIL)])
def test_a_difference_is_found_and_equals_pass(slower: float, verdict: str) -> None:
    """Where steps are cheap: hundreds of rounds of 10% noise tell 1.0 and 1.2 from 1.05."""
    plan = replace(PLAN, rounds=Rounds(minimum=100, maximum=100, warmups=1))
    verdicts = [judge(plan, seed, slower)[0] for seed in range(20)]
    assert verdicts.count(verdict) >= 19 and {PASS: FAIL, FAIL: PASS}[verdict] not in verdicts


def test_rounds_are_added_only_while_undecided() -> None:
    first = fewest_rounds(confidence(JUDGEMENTS))
    assert judge(PLAN, seed=1, slower=100.0) == (FAIL, first)
    assert judge(PLAN, seed=1, slower=1 + budget.SMALLEST_EFFECT) == (UNDECIDED, first * 2 ** (LOOKS - 1))
    assert len(_laps(replace(PLAN, limits=None))) == 2  # nothing to decide
    assert len(_laps(replace(PLAN, peer=None))) == 2  # nobody to compare with
    seconds = Limits(confidence(JUDGEMENTS), seconds=(1e-9, 100.0))
    assert len(_laps(replace(PLAN, peer=None, limits=seconds))) == first


def _laps(plan: Plan) -> list[Laps]:
    return passes._time(plan, Memory(), Drawn(MINE, None, "cpu")).laps[IMPLEMENTATION]


def test_slow_steps_are_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "UNDECIDED_SECONDS", 0.0)
    assert judge(PLAN, seed=1, slower=1 + budget.SMALLEST_EFFECT) == (UNDECIDED, fewest_rounds(confidence(JUDGEMENTS)))


class SlowInTurns(Drawn):
    """The ranks take turns at being slow, so that only the slowest of each round is always slow."""

    backend = "gloo"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        super().__init__(implementation, case, device)
        self.steps = dist.get_rank()

    def step(self, mark: Mark) -> None:
        self.steps += 1
        time.sleep(0.1 if self.implementation.name == "eager" and self.steps % 2 else 0.002)


def measured_in_turns(plan: Plan) -> Measured:
    """The timed rounds of the plan on this rank."""
    return passes._time(plan, Memory(), plan.workload(plan.implementation, None, "cpu"))


def test_ranks_decide_together_by_the_slowest_of_each_round(worlds: WorldsBySize) -> None:
    eager, peer = resolve("training_step", "eager"), resolve("training_step", "checkpointed")
    plan = replace(PLAN, workload=SlowInTurns, implementation=eager, peer=peer, world_size=2)
    plan = replace(plan, limits=Limits(confidence(1), ratios=(2.0,)))
    ranks = worlds(2).run(measured_in_turns, plan)
    rounds = {len(laps) for rank in ranks for laps in rank.laps.values()}
    assert rounds == {fewest_rounds(confidence(1))}  # decided at the first look
    assert min(step_seconds(ranks)) >= 0.1 and min(step_seconds(ranks, PEER)) < 0.1


@pytest.mark.sweep
def test_200_verdicts_on_an_implementation_against_itself(worlds: WorldsBySize) -> None:
    """Real times: none fails."""
    itself = Implementation("attention", "eager", eager_attention, spec="eager")
    case = AttentionCase(batch=1, seq=128, head_dim=32)
    judgements = 200
    limits = Limits(confidence(judgements), ratios=(1.0,))
    rounds = Rounds(minimum=7, max_seconds=0.05)
    plan = plan_of(AttentionPass, itself, case, peer=itself, rounds=rounds, limits=limits)
    verdicts = []
    for _ in range(judgements):
        measured = worlds(1).run(passes.measure, plan)
        _, interval = time_entry(measured, Race("itself", budget=1.0), limits.confidence)
        assert interval is not None
        verdicts.append(interval.verdict(budget.tolerated(1.0)))
    counts = {verdict: verdicts.count(verdict) for verdict in (PASS, UNDECIDED, FAIL)}
    print(counts)
    assert counts[FAIL] == 0 and counts[PASS] > judgements / 4, counts
