"""Time a case in two versions of the code that take turns, each on ranks of its own, in fresh processes each time.

A process keeps its layout of memory and its caches, so pairs of one process share a shift. Several fresh ones show how
much of a difference that is.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardmark.api.workload import Workload
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import shuffled, timed_step, warmed_up
from shardmark.meter.plan import Plan
from shardmark.ranks.world import World
from shardmark.verdict.betting import UNDECIDED
from shardmark.verdict.slowdown import (
    FEWEST_PAIRS,
    FEWEST_PROCESSES,
    USUAL_PROCESSES,
    Paired,
    Pairs,
    paired,
    slowdown,
    stalls,
)

TURN = 0.005
"""Seconds that a version steps before the other one's turn, at least: shorter steps take several."""
LEAST_SECONDS, MOST_SECONDS = 1.0, 12.0
"""Seconds of one pair of processes: at least for steadiness, at most if the pairs are long."""
PATIENCE = 60.0
"""Seconds after which no further processes are started; a slowdown that is to be confirmed gets those that it needs."""
MOST_PROCESSES = 20

HERE, THERE = "here", "there"

StartWorld = Callable[[str], World]
"""Starts fresh ranks of HERE, this version, or of THERE, the other one."""

Run = Callable[..., list[Any]]
"""Calls a function on every rank of one version's world."""

_live: list[tuple[Plan, Workload]] = []
"""On a rank: the plan and the workload that it is timing."""


@dataclass
class Race:
    """The pairs of all processes, in seconds by turns of both versions, and all steps one by one."""

    processes: list[Pairs] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=lambda: {HERE: [], THERE: []})

    def paired(self, confidence: float) -> Paired:
        """The sum of the pairs so far."""
        return paired(self.processes, confidence)

    @property
    def stalls(self) -> str:
        """This version's stalls in words; empty where the other one stalls as often."""
        return stalls(self.steps[HERE], self.steps[THERE])


def race(plan: Plan, start: StartWorld, calls: Callable[[str, World], Run], confidence: float, largest: float) -> Race:
    """Time both versions in fresh processes until the slowdown is decided or PATIENCE is over."""
    found, began, coin = Race(), time.monotonic(), random.Random(plan.coin)
    while True:
        first, second = shuffled([HERE, THERE], coin)  # the operating system may favour either
        with start(first) as one, start(second) as other:
            _one_process(plan, {first: calls(first, one), second: calls(second, other)}, coin, found)
        count, elapsed = len(found.processes), time.monotonic() - began
        now = slowdown(found.paired(confidence))
        needs = count < FEWEST_PROCESSES or now.verdict(largest) == UNDECIDED
        late = elapsed + elapsed / count > PATIENCE and not (count < now.needed and now.shown())
        if not needs or late or count == MOST_PROCESSES:
            return found


def _one_process(plan: Plan, calls: dict[str, Run], coin: random.Random, race: Race) -> None:
    """Take turns in one pair of processes. Each turn follows one of the other version, not timed if need be."""
    warm = {name: call(_begin, plan) for name, call in calls.items()}
    step = max(lap.elapsed for laps in warm.values() for lap in laps)
    ahead = max(lap.host or 0.0 for laps in warm.values() for lap in laps)
    steps = max(1, math.ceil(TURN / max(step, 1e-5)))
    pairs: dict[str, list[float]] = {HERE: [], THERE: []}
    began, last = time.monotonic(), ""
    fewest = math.ceil(FEWEST_PAIRS / USUAL_PROCESSES)
    while True:
        elapsed, done = time.monotonic() - began, len(pairs[HERE])
        if (done >= fewest and elapsed > LEAST_SECONDS) or (done >= 2 and elapsed > MOST_SECONDS):
            break
        order = shuffled([HERE, THERE], coin)
        if last != order[1]:
            calls[order[1]](_turn, 1, ahead)
        for name in order:
            turns = calls[name](_turn, steps, ahead)
            seconds = [max(laps) for laps in zip(*turns, strict=True)]
            pairs[name].append(sum(seconds))
            race.steps[name] += seconds
        last = order[1]
    race.processes.append((pairs[HERE], pairs[THERE]))


def _begin(plan: Plan) -> Laps:
    """Make the workload on this rank, warm it up and time one step."""
    _live[:] = [(plan, warmed_up(plan))]
    return timed_step(plan, _live[0][1], _live[0][1].step)


def _turn(steps: int, ahead: float) -> list[float]:
    """The seconds of that many steps on this rank."""
    ((plan, workload),) = _live
    return [timed_step(plan, workload, workload.step, ahead).seconds for _ in range(steps)]
