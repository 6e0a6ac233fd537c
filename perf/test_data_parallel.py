"""What does a data-parallel training step cost, and how much of its communication is exposed?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.data_parallel.accounting import best_bucket_bytes, exposed_seconds, work
from impl.data_parallel.cases import CASES, ReductionCase
from impl.data_parallel.workload import AllReduces, DataParallelStep, OverheadCase
from impl.model import SIZES
from impl.training_step.cases import TrainingStepCase
from perf.published import beside
from shardmark.api import MB, Grid, Implementation, Race
from shardmark.meter.measure_case import measure as measure_on_rank
from shardmark.meter.plan import Plan, Rounds
from shardmark.plugin.measure import Measure, memory_budget
from shardmark.ranks.world import World
from shardmark.report.answers import fastest
from shardmark.report.observed_answers import best_bucket
from shardmark.report.plots import Lines
from shardmark.rows.observers import ExposedCommunication
from shardmark.rows.observers.overhead_model import OverheadModel

_SIZES = {"smoke": (1, 25), "laptop": (1, 10, 100), "paper": (1, 10, 100, 1000)}  # MB

BUCKETS = Grid(
    smoke=[replace(CASES.smoke[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["smoke"]],
    laptop=[replace(CASES.laptop[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["laptop"]],
    paper=[replace(CASES.paper[-1], bucket_mb=bucket_mb) for bucket_mb in _SIZES["paper"]],
)


def _overhead(model: str, scale: str, *kilobytes: int) -> OverheadCase:
    largest = max(kilobytes) * 1024
    return OverheadCase("all_reduce", largest, model=model, bucket_sizes=_SIZES[scale], kilobytes=kilobytes)


BUCKET_MODEL = Grid(
    smoke=[_overhead("tiny", "smoke", 4, 64, 1024)],
    laptop=[_overhead("mini", "laptop", 4, 256, 2048, 16_384)],
    paper=[_overhead("xl", "paper", 4, 256, 16_384, 262_144)],
)

REDUCTIONS = Grid(
    smoke=[ReductionCase("tiny", batch=2, context=32)],
    laptop=[ReductionCase("mini", batch=2, context=32)],
    paper=[ReductionCase(case.model, case.batch, case.context, case.dtype) for case in CASES.paper],
    full=[ReductionCase(case.model, case.batch, case.context, case.dtype) for case in CASES.at("full")],
)


EXPOSED = ["case", "implementation", "time ms", "exposed comm.", "ratio to peer", "tensors MiB", "verdict"]

BUCKET_SIZE = pytest.mark.question(
    "Which bucket size is best?",
    short="bucket size",
    columns=EXPOSED,
    answer=best_bucket,
    plots=[
        Lines(
            "Exposed communication by bucket size",
            x="case.bucket_mb",
            x_title="bucket size, MB",
            y="time.parts.communication",
            y_title="exposed communication",
            unit="s",
            curve="time.model.exposed",
            best=("time.model.best_bytes", "time.model.best_seconds"),
            x_scale=1 / MB,
        )
    ],
)


@pytest.mark.family("data_parallel")
@pytest.mark.question(
    "What does a data-parallel training step cost?",
    short="data parallelism",
    columns=EXPOSED,
    answer=fastest,
    plots=[beside.DATA_PARALLEL],
)
@pytest.mark.cases(CASES)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


@pytest.mark.family("data_parallel", option="bucket_mb")
@BUCKET_SIZE
@pytest.mark.cases(BUCKETS)
@pytest.mark.benchmark(min_rounds=9)
def test_bucket_size(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    """DDP with buckets of the same size is the peer of the others, so it has none here."""
    _measure(implementation, case, world, measure, implementation.races.get("bucket size"))


@pytest.mark.family("data_parallel", option="reduce_dtype")
@pytest.mark.question(
    "What does it cost to communicate gradients in half precision?",
    short="bfloat16 gradients",
    columns=["case", "implementation", "time ms", "exposed comm.", "ratio to peer", "to send MiB", "verdict"],
    answer=fastest,
)
@pytest.mark.cases(REDUCTIONS)
@pytest.mark.benchmark(min_rounds=9)
def test_reduction_dtype(implementation: Implementation, case: ReductionCase, world: World, measure: Measure) -> None:
    """Race against DDP, which sends gradients in float32: the link decides which is faster."""
    _measure(implementation, case, world, measure, Race("ddp"))


def _measure(
    implementation: Implementation,
    case: TrainingStepCase,
    world: World,
    measure: Measure,
    time: Race | None = None,
) -> None:
    ranks = world.size
    measure(
        DataParallelStep,
        implementation,
        case,
        world_size=ranks,
        work=work(case, ranks),
        slack=1.02,
        time=time,
        observe=[ExposedCommunication()],
    )


@pytest.mark.family("collectives")
@BUCKET_SIZE
@pytest.mark.cases(BUCKET_MODEL)
def test_model_of_overhead(
    implementation: Implementation, case: OverheadCase, world: World, device: str, measure: Measure
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to reduce")
    case = replace(case, ranks=world.size)
    plan = Plan(AllReduces, implementation, None, case, device, world.size, Rounds(minimum=20, max_seconds=0.5))
    ranks = measure.attempt(
        plan.identity,
        memory_budget(implementation, case, device),
        lambda: world.run(measure_on_rank, plan, deadline=measure.deadline),
    )
    gradients = 4 * SIZES[case.model].parameters
    model = OverheadModel(gradients, case.kilobytes, case.bucket_sizes, best_bucket_bytes, exposed_seconds)
    row = measure.record(plan.identity, ranks, observe=[model])
    if "model" not in row["time"]:
        pytest.skip("undecided: more bytes took no longer, so there is no bandwidth to report")
