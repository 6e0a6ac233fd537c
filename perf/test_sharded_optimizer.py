"""What does sharding the optimizer save, and cost: memory by kind, step time, bytes communicated?

A step here begins with the optimizer, on the gradients of the backward before it, and ends with its own gradients
averaged: so the exchange of parameters has a forward to hide behind, and nothing is under way when the clock stops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.sharded_optimizer.cases import CASES, ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from perf.published import beside
from shardmark.api import Implementation
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.answers import saves
from shardmark.report.plots import MEMORY
from shardmark.rows.observers import ExposedCommunication, Timeline


@pytest.mark.family("sharded_optimizer")
@pytest.mark.question(
    "What does sharding the optimizer save, and cost?",
    short="sharded optimizer",
    columns=["case", "implementation", "time ms", "exposed comm.", "ratio to peer", "tensors MiB", "verdict"],
    answer=saves("unsharded"),
    plots=[MEMORY, beside.SHARDED_OPTIMIZER],
)
@pytest.mark.cases(CASES)
@pytest.mark.benchmark(min_rounds=9)
def test_sharded_optimizer(
    implementation: Implementation, case: ShardedStepCase, world: World, measure: Measure
) -> None:
    case = replace(case, ranks=world.size)
    measure(
        ShardedStep,
        implementation,
        case,
        world_size=world.size,
        work=implementation.facts.work(case),
        slack=1.02,
        observe=[ExposedCommunication(), Timeline()],
    )
