"""Time a case in fresh processes, as a comparison with an earlier run needs them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from shardmark.meter.measure_case import time_again
from shardmark.meter.plan import Measured, Plan
from shardmark.ranks.world import Worlds
from shardmark.rows.pairs import NAMES, paired_with, sums
from shardmark.verdict.slowdown import FEWEST_PAIRS, FEWEST_PROCESSES

PATIENCE = 40.0
"""Seconds after which no further process is started, once there are three."""
MOST_PROCESSES = 8


def in_fresh_processes(
    plan: Plan, ranks: Sequence[Measured], worlds: Worlds, deadline: float
) -> list[Sequence[Measured]]:
    """What further processes measure, while they would decide a comparison; none where none is asked for."""
    processes: list[Sequence[Measured]] = [ranks]
    limits, began = plan.limits, time.monotonic()
    if limits is None or limits.gate is None:
        return []
    least = math.ceil(FEWEST_PAIRS / FEWEST_PROCESSES)
    short = replace(plan, limits=None, rounds=replace(plan.rounds, minimum=max(plan.rounds.minimum, least)))
    while len(processes) < MOST_PROCESSES:
        pairs = {name: paired_with(name, processes) for name in NAMES}
        late = time.monotonic() - began > PATIENCE and len(processes) >= FEWEST_PROCESSES
        if late or limits.gate.decided(sums(pairs, limits.confidence)):
            break
        with worlds.fresh(plan.world_size) as world:
            processes.append(world.run(time_again, short, deadline=deadline))
    return processes[1:]
