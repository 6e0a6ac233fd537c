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
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.accounting.data_parallel import work
from impl.accounting.fsdp import work as fsdp_work
from impl.accounting.sharded_optimizer import work as sharded_work
from impl.accounting.sharded_optimizer import zero_redundancy_work
from perf.ranks import RankStep, language_model
from perf.test_data_parallel import DataParallelStep
from perf.test_fsdp import FSDPStep
from perf.test_sharded_optimizer import ShardedStep
from shardmark import cases, registry
from shardmark.cases import MB, FSDPCase, ShardedStepCase, TrainingStepCase
from shardmark.measure import Measure
from shardmark.passes import timed_steps
from shardmark.plan import Mark, Plan, Rounds
from shardmark.registry import Implementation, Race
from shardmark.world import World

pytestmark = [
    pytest.mark.usefixtures("link"),
    pytest.mark.benchmark(min_rounds=12),
]

WHAT_HIDES = pytest.mark.question("What hides behind backward on a limited link?")

DEFAULT_BUCKET_MB = 25


class Compute(RankStep):
    """A training step of this rank alone: nothing is communicated."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The model itself, and the optimizer that it has in DataParallelStep."""
        model = language_model(case)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Communication:
    """All-reduce as many bytes as the model has gradients, in buckets of the case's size, and compute nothing."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        size = sum(parameter.numel() for parameter in language_model(case).parameters())
        bucket = (case.bucket_mb or DEFAULT_BUCKET_MB) * MB // 4
        self.buckets = torch.zeros(size, device=device).split(bucket)

    def prepare(self) -> None:
        """Zeros stay zeros."""

    def step(self, mark: Mark) -> None:
        """All buckets at once, as none has to wait for its gradients."""
        for handle in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
            handle.wait()


class StepOnLink(DataParallelStep):
    """A training step, and in the same rounds what it computes and what it communicates, each alone."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        super().__init__(implementation, case, device)
        self.alone = implementation, case, device
        self.compute: Compute | None = None
        self.communication: Communication | None = None

    def compute_step(self, mark: Mark) -> None:
        """Compute alone, on a model of its own that is made in the first call, when no meter runs."""
        self.compute = self.compute or Compute(*self.alone)
        self.compute.prepare()
        self.compute.step(mark)

    def communication_step(self, mark: Mark) -> None:
        """Communication alone."""
        self.communication = self.communication or Communication(*self.alone)
        self.communication.step(mark)


@pytest.mark.family("data_parallel", only=("bucketed",))
@WHAT_HIDES
@pytest.mark.cases(cases.LINK_BUCKETS)
@pytest.mark.benchmark(min_rounds=24)  # with small buckets both hide nearly all that can be hidden
def test_bucket_sizes_against_ddp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    """The goal is that none is slower."""
    _measure(measure, implementation, _balanced(case, world, device), world, Race("ddp", budget=2.0, goal=1.0))


@pytest.mark.family("data_parallel", only=("bucketed",))
@WHAT_HIDES
@pytest.mark.cases(cases.LINK)
def test_buckets_against_ddp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    """Each as it comes: both with buckets of 25 MB at most."""
    _measure(measure, implementation, _balanced(case, world, device), world, Race("ddp", budget=2.0, goal=0.95))


@pytest.mark.family("data_parallel")
@WHAT_HIDES
@pytest.mark.cases(cases.LINK)
def test_what_is_hidden_need_not_be_waited_for(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    bucketed = implementation.name == "bucketed"
    race = Race("naive", budget=1.0, goal=0.75) if bucketed else Race("naive")
    _measure(measure, implementation, _balanced(case, world, device), world, race)


@pytest.mark.family("sharded_optimizer")
@pytest.mark.question("What does sharding cost on a limited link?")
@pytest.mark.cases(cases.LINK)
def test_sharded_optimizer(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    case = ShardedStepCase(**asdict(_balanced(case, world, device)), ranks=world.size)
    theory = zero_redundancy_work if implementation.name == "zero_redundancy" else sharded_work
    time = Race("zero_redundancy", budget=2.0, goal=0.85) if implementation.name == "sharded" else None
    measure(ShardedStep, implementation, case, world_size=world.size, work=theory(case), slack=1.02, time=time)


@pytest.mark.family("fsdp", only=("sharded", "fsdp2"))
@pytest.mark.question("What does sharding cost on a limited link?")
@pytest.mark.cases(cases.LINK)
def test_fsdp(
    implementation: Implementation, case: TrainingStepCase, world: World, device: str, measure: Measure
) -> None:
    case = FSDPCase(**asdict(_balanced(case, world, device)), ranks=world.size)
    measure(FSDPStep, implementation, case, world_size=world.size, work=fsdp_work(case), slack=1.02)


def _measure(
    measure: Measure, implementation: Implementation, case: TrainingStepCase, world: World, time: Race
) -> None:
    measure(StepOnLink, implementation, case, world_size=world.size, work=work(case, world.size), time=time)


def _balanced(case: TrainingStepCase, world: World, device: str) -> TrainingStepCase:
    """The case with the batch for which, on this machine, a step computes for as long as it communicates."""
    if world.size == 1:
        pytest.skip("one rank has nobody at the other end")
    return replace(case, batch=_balanced_batch(replace(case, bucket_mb=None), world, device))


@cache
def _balanced_batch(case: TrainingStepCase, world: World, device: str) -> int:
    """Found once a world, so that a table's rows are of one case."""
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
    plan = Plan(workload, implementation, None, case, device, world.size, Rounds())
    ranks = world.run(timed_steps, plan, 8)
    return median(max(lap.seconds for lap in laps) for laps in list(zip(*ranks, strict=True))[2:])
