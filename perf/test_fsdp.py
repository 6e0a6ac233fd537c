"""What does sharding everything save, and what does it cost?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.fsdp.accounting import work
from impl.fsdp.cases import CASES, FSDPCase
from impl.fsdp.workload import FSDPStep
from shardmark.api import Grid, Implementation
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.answers import saves
from shardmark.report.plots import MEMORY

LOW_PRECISION = Grid(
    smoke=[],
    laptop=[replace(case, dtype="bfloat16") for case in CASES.laptop],
    paper=[],  # bfloat16 already
)

SHARDING = pytest.mark.question(
    "What does sharding everything save, and what does it cost?",
    short="fully sharded",
    columns=["case", "implementation", "time ms", "to send MiB", "ratio to peer", "tensors MiB", "verdict"],
    answer=saves(),
    plots=[MEMORY],
)


@pytest.mark.family("fsdp")
@SHARDING
@pytest.mark.cases(CASES)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


@pytest.mark.family("fsdp", only=("sharded", "fsdp2"))
@SHARDING
@pytest.mark.cases(LOW_PRECISION)
@pytest.mark.benchmark(min_rounds=9)
def test_low_precision_step(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


def _measure(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    case = replace(case, ranks=world.size)
    facts = implementation.facts
    amount = work(case, kept=not facts.reshard_after_forward, norms_replicated=facts.norms_replicated)
    measure(FSDPStep, implementation, case, world_size=world.size, work=amount, slack=1.02)
