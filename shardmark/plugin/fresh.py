"""Time a case in fresh processes, as a comparison with an earlier run needs them."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shardmark.meter.measure_case import time_again
from shardmark.meter.plan import Measured, Plan
from shardmark.ranks.world import Worlds
from shardmark.rows.pairs import NAMES, paired_with, sums
from shardmark.verdict.slowdown import FEWEST_PAIRS, FEWEST_PROCESSES, Gate

PATIENCE = 40.0
"""Seconds after which no further process is started, once there are three."""
MOST_PROCESSES = 8


def in_fresh_processes(
    plan: Plan, gate: Gate, confidence: float, worlds: Worlds, deadline: float
) -> list[list[Measured]]:
    """The ranks' measurements in each of the processes that decide the comparisons, or as many as PATIENCE allows."""
    processes: list[list[Measured]] = []
    began, least = time.monotonic(), math.ceil(FEWEST_PAIRS / FEWEST_PROCESSES)
    short = replace(plan, limits=None, rounds=replace(plan.rounds, minimum=max(plan.rounds.minimum, least)))
    while len(processes) < MOST_PROCESSES:
        with worlds.fresh(plan.world_size) as world:
            processes.append(world.run(time_again, short, deadline=deadline))
        late = time.monotonic() - began > PATIENCE and len(processes) >= FEWEST_PROCESSES
        if late or gate.decided(sums({name: paired_with(name, processes) for name in NAMES}, {}, confidence)):
            break
    return processes
