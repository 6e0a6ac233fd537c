"""What does a data-parallel training step cost, and how much of its communication is exposed?"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from impl.data_parallel.accounting import best_bucket_bytes, exposed_seconds, work
from impl.data_parallel.cases import ReductionCase
from impl.model import SIZES
from impl.training_step.cases import TrainingStepCase
from perf.workloads.data_parallel import AllReduces, DataParallelStep, OverheadCase
from shardmark.grid import MB, Grid
from shardmark.measure import CASE_DEADLINE, Measure
from shardmark.passes import measure as measure_on_rank
from shardmark.plan import IMPLEMENTATION, Measured, Plan, Rounds
from shardmark.registry import Implementation, Race
from shardmark.report.fits import fit_line
from shardmark.world import World

CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=32)],
    paper=[TrainingStepCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)

_SIZES = {"smoke": (1, 25), "laptop": (1, 10, 100), "paper": (1, 10, 100, 1000)}  # MB

BUCKETS = Grid(
    smoke=[replace(CASES.smoke[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["smoke"]],
    laptop=[replace(CASES.laptop[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["laptop"]],
    paper=[replace(CASES.paper[-1], bucket_mb=bucket_mb) for bucket_mb in _SIZES["paper"]],
)


def _overhead(model: str, scale: str, *kilobytes: int) -> OverheadCase:
    largest = max(kilobytes) * 1024 // MB
    return OverheadCase("all_reduce", largest, model=model, bucket_sizes=_SIZES[scale], kilobytes=kilobytes)


BUCKET_MODEL = Grid(
    smoke=[_overhead("tiny", "smoke", 4, 64, 1024)],
    laptop=[_overhead("mini", "laptop", 4, 256, 2048, 16_384)],
    paper=[_overhead("xl", "paper", 4, 256, 16_384, 262_144)],
)

REDUCTIONS = Grid(
    smoke=[ReductionCase("tiny", batch=2, context=32)],
    laptop=[ReductionCase("mini", batch=2, context=32)],
    paper=[ReductionCase(case.model, case.batch, case.context) for case in CASES.paper],
)


@pytest.mark.family("data_parallel")
@pytest.mark.question("What does a data-parallel training step cost?")
@pytest.mark.cases(CASES)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(BUCKETS)
@pytest.mark.benchmark(min_rounds=9)
def test_bucket_size(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    """DDP, which others are held to at the same size, has no peer here."""
    _measure(implementation, case, world, measure, Race("ddp") if implementation.name == "ddp" else None)


@pytest.mark.family("data_parallel", option="reduce_dtype")
@pytest.mark.question("What does it cost to communicate gradients in half precision?")
@pytest.mark.cases(REDUCTIONS)
@pytest.mark.benchmark(min_rounds=9)
def test_reduction_dtype(implementation: Implementation, case: ReductionCase, world: World, measure: Measure) -> None:
    """Against DDP, whose gradients travel in float32: what is faster depends on the link."""
    _measure(implementation, case, world, measure, Race("ddp"))


def _measure(
    implementation: Implementation,
    case: TrainingStepCase,
    world: World,
    measure: Measure,
    time: Race | None = None,
) -> None:
    ranks = world.size
    measure(DataParallelStep, implementation, case, world_size=ranks, work=work(case, ranks), slack=1.02, time=time)


def overhead_model(ranks: list[Measured], case: OverheadCase) -> dict[str, Any] | None:
    """Overhead and bandwidth of an all-reduce, each size's time the median of the slowest rank's, and what they say.

    None where noise makes more bytes take no longer.
    """
    rounds = list(zip(*(rank.laps[IMPLEMENTATION] for rank in ranks), strict=True))
    seconds = {
        size * 1024: median(max(laps.parts[f"{size} KB"] for laps in round_) for round_ in rounds)
        for size in case.kilobytes
    }
    overhead, per_byte, miss = fit_line(seconds)
    if per_byte <= 0:
        return None
    gradients = 4 * SIZES[case.model].parameters
    fitted = max(overhead, 0.0), 1 / per_byte
    best = best_bucket_bytes(gradients, *fitted)
    return {
        "seconds": {str(nbytes): each for nbytes, each in seconds.items()},
        "gradient_bytes": gradients,
        "overhead": fitted[0],
        "bandwidth": fitted[1],
        "miss": miss,
        "best_bytes": best,
        "best_seconds": exposed_seconds(gradients, best, *fitted) if best else 0.0,
        "exposed": {
            str(size): exposed_seconds(gradients, min(size * MB, gradients), *fitted) for size in case.bucket_sizes
        },
    }


@pytest.mark.family("collectives")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(BUCKET_MODEL)
def test_model_of_overhead(
    implementation: Implementation, case: OverheadCase, world: World, device: str, measure: Measure
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to reduce")
    case = replace(case, ranks=world.size)
    plan = Plan(AllReduces, implementation, None, case, device, world.size, Rounds(minimum=20, max_seconds=0.5))
    ranks = measure.attempt(plan, lambda plan: world.run(measure_on_rank, plan, deadline=CASE_DEADLINE))
    model = overhead_model(ranks, case)
    measure.record(plan, ranks, times={"model": model} if model else {})
    if model is None:
        pytest.skip("undecided: more bytes took no longer, so there is no bandwidth to tell")
