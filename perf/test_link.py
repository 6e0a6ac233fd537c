"""What hides behind backward on a link of 1 Gbit/s?

    pytest perf/test_link.py --link 1gbit    # or tox -e link, as root

Ranks on two hosts, and a batch for which a step computes for about as long as the link takes for its gradients: all of
the communication could hide then, and what does not hide shows.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from statistics import median
from typing import Any

import pytest

from impl.data_parallel.accounting import work
from impl.data_parallel.link_workload import Communication, Compute, DataParallelOnLink
from impl.fsdp.accounting import work as fsdp_work
from impl.fsdp.cases import FSDPCase
from impl.fsdp.link_workload import FSDPOnLink
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from impl.tensor_parallel.accounting import work as tensor_parallel_work
from impl.tensor_parallel.cases import TensorParallelCase
from impl.tensor_parallel.link_workload import TensorParallelOnLink
from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, Implementation, Race, registry
from shardmark.meter.measure_case import timed_steps
from shardmark.meter.plan import Plan
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.observed_answers import hides
from shardmark.rows.observers import ExposedCommunication, HiddenCommunication, Timeline

_BUCKETS_MB = (1, 2, 5, 10, 25)

CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=4, context=32)],
    laptop=[TrainingStepCase("wide", batch=8, context=32)],
    paper=[TrainingStepCase(model, batch=4, context=512, dtype="bfloat16") for model in ("small", "medium")],
)
"""The search for the batch whose compute takes as long as its communication starts from the batch given here."""

BUCKETS = Grid(
    smoke=[replace(case, bucket_mb=bucket_mb) for case in CASES.smoke for bucket_mb in _BUCKETS_MB[::4]],
    laptop=[replace(case, bucket_mb=bucket_mb) for case in CASES.laptop for bucket_mb in _BUCKETS_MB],
    paper=[replace(case, bucket_mb=bucket_mb) for case in CASES.paper for bucket_mb in _BUCKETS_MB],
)

ACTIVATIONS = Grid(
    smoke=[TensorParallelCase("tiny", batch=2, context=32)],
    laptop=[TensorParallelCase("wide", batch=4, context=128)],
    paper=[TensorParallelCase("medium", batch=4, context=1024, dtype="bfloat16")],
)
"""It sends in proportion to the tokens, as it computes: the width decides which of both takes longer. `wide` computes
for half as long again as it sends, so that all of it could hide."""


pytestmark = [
    pytest.mark.usefixtures("link"),
    pytest.mark.benchmark(min_rounds=12),
]

WHAT_HIDES = pytest.mark.question(
    "What hides behind backward on a limited link?",
    short="hidden on a link",
    columns=["case", "implementation", "time ms", "hidden", "ratio to peer", "goal", "verdict"],
    answer=hides("naive"),
)
PRODUCTS = pytest.mark.question(
    "What hides behind the products of tensor parallelism on a limited link?",
    short="activations on a link",
    columns=["case", "implementation", "time ms", "hidden", "ratio to peer", "goal", "verdict"],
    answer=hides("sequence"),
)
SHARDING = pytest.mark.question(
    "What does sharding cost on a limited link?",
    short="sharding on a link",
    columns=["case", "implementation", "time ms", "exposed comm.", "ratio to peer", "goal", "verdict"],
)


@pytest.mark.family("data_parallel", only=("bucketed",))
@WHAT_HIDES
@pytest.mark.cases(BUCKETS)
@pytest.mark.benchmark(min_rounds=24)  # with small buckets both hide nearly all that can be hidden
def test_bucket_sizes_against_ddp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    """The goal is that none is slower."""
    _measure(measure, implementation, _balanced(case, world, device), world, Race("ddp", budget=2.0, goal=1.0))


@pytest.mark.family("data_parallel", only=("bucketed",))
@WHAT_HIDES
@pytest.mark.cases(CASES)
def test_buckets_against_ddp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    """Both with their default buckets of at most 25 MB."""
    _measure(measure, implementation, _balanced(case, world, device), world, Race("ddp", budget=2.0, goal=0.95))


@pytest.mark.family("data_parallel")
@WHAT_HIDES
@pytest.mark.cases(CASES)
def test_what_is_hidden_need_not_be_waited_for(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    race = implementation.races.get("link", Race("naive"))
    _measure(measure, implementation, _balanced(case, world, device), world, race)


@pytest.mark.family("sharded_optimizer")
@SHARDING
@pytest.mark.cases(CASES)
def test_sharded_optimizer(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    case = ShardedStepCase(**asdict(_balanced(case, world, device)), ranks=world.size)
    measure(
        ShardedStep,
        implementation,
        case,
        world_size=world.size,
        work=implementation.facts.work(case),
        slack=1.02,
        time=implementation.races.get("link"),
        observe=[ExposedCommunication(), Timeline()],
    )


@pytest.mark.family("fsdp", only=("sharded", "fsdp2"))
@SHARDING
@pytest.mark.cases(CASES)
def test_fsdp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    case = FSDPCase(**asdict(_balanced(case, world, device)), ranks=world.size)
    measure(
        FSDPOnLink,
        implementation,
        case,
        world_size=world.size,
        work=fsdp_work(case),
        slack=1.02,
        observe=[ExposedCommunication()],
    )


@pytest.mark.family("tensor_parallel", only=("sequence", "hidden"))
@PRODUCTS
@pytest.mark.cases(ACTIVATIONS)
def test_tensor_parallelism(
    implementation: Implementation, case: TensorParallelCase, world: World, measure: Measure
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nobody at the other end")
    case = replace(case, mesh=f"tp={world.size}")
    measure(
        TensorParallelOnLink,
        implementation,
        case,
        world_size=world.size,
        work=tensor_parallel_work(case),
        slack=1.02,
        time=implementation.races.get("link"),
        observe=[HiddenCommunication()],
    )


def _measure(
    measure: Measure, implementation: Implementation, case: TrainingStepCase, world: World, time: Race
) -> None:
    measure(
        DataParallelOnLink,
        implementation,
        case,
        world_size=world.size,
        work=work(case, world.size),
        time=time,
        observe=[HiddenCommunication()],
    )


def _balanced(case: TrainingStepCase, world: World, device: str) -> TrainingStepCase:
    """The case with the batch for which, on this machine, a step computes for as long as it communicates."""
    if world.size == 1:
        pytest.skip("one rank has nobody at the other end")
    return replace(case, batch=_balanced_batch(replace(case, bucket_mb=None), world, device))


@cache
def _balanced_batch(case: TrainingStepCase, world: World, device: str) -> int:
    """The balanced batch, searched once for each world, so that all rows of a table have the same case."""
    reference = registry.resolve("data_parallel", registry.family("data_parallel").reference)
    communication = _seconds(world, Communication, reference, case, device)
    little, much = (
        _seconds(world, Compute, reference, replace(case, batch=batch), device)
        for batch in (case.batch, 2 * case.batch)
    )
    by_sequence = max(much - little, 0.1 * little) / case.batch  # what does not grow with the batch is the optimizer's
    return max(1, case.batch + round((communication - little) / by_sequence))


def _seconds(world: World, workload: Any, implementation: Implementation, case: TrainingStepCase, device: str) -> float:
    """The median step of the slowest rank, after two that warm up."""
    plan = Plan(workload, implementation, None, case, device, world.size)
    ranks = world.run(timed_steps, plan, 8)
    return median(max(lap.seconds for lap in laps) for laps in list(zip(*ranks, strict=True))[2:])
