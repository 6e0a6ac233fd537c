"""How long do a pipeline's ranks wait, by schedule and micro-batches; and is it faster than full sharding?

Ranks sleep in place of computing, so that a machine with fewer cores than ranks shows it. The bubble is the share of a
step for which a rank does not compute; messages, and the time at which a sleeper is woken, are in what is measured.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.mesh.accounting import work_of
from impl.mesh.cases import SIZES, MeshCase
from impl.pipeline.cases import CASES, DECODERS, DecoderCase, SleepingCase
from impl.pipeline.contract import Facts
from impl.pipeline.workload import PipelinedStep
from perf.mesh_step import measure_step
from perf.sleeping_stages import SleepingStep, computing_seconds
from shardmark.api import Grid, Implementation, Mesh, Work
from shardmark.plugin.measure import Measure
from shardmark.report.answers import fastest, fastest_and_smallest, most
from shardmark.report.plots import SPANS
from shardmark.rows.columns import Column
from shardmark.rows.observers import Spans
from shardmark.text import mib

MEASURED = Column("bubble", lambda entry, row: f"{share:.3f}" if (share := row["work"].get("bubble")) else None)
FORMULA = Column(
    "by formula", lambda entry, row: f"{share:.3f}" if (share := row["work"].get("bubble_by_formula")) else None
)


@pytest.mark.question(
    "How long do a pipeline's ranks wait?",
    short="bubbles",
    columns=["case", "implementation", "time ms", MEASURED, FORMULA],
    answer=fastest,
    plots=[SPANS],
)
@pytest.mark.family("pipeline")
@pytest.mark.cases(CASES)
@pytest.mark.meshes("pp=4")
def test_bubble(implementation: Implementation, case: SleepingCase, mesh: Mesh, measure: Measure) -> None:
    case, facts = replace(case, ranks=mesh.size), implementation.facts
    known = facts.bubble if isinstance(facts, Facts) else None
    formula = None if known is None else known(case.ranks, case.micro_batches)
    measure(
        SleepingStep,
        implementation,
        case,
        world_size=mesh.size,
        work=Work(),
        observe=[Spans()],
        rates=lambda seconds: {"bubble": 1 - computing_seconds(case) / seconds, "bubble_by_formula": formula},
    )


BY_RANK = Column(
    "tensors by rank MiB",
    lambda entry, row: ", ".join(map(mib, peaks)) if (peaks := row["memory"].get("tensors_by_rank")) else None,
)


@pytest.mark.question(
    "What do a pipeline's ranks hold, and what does zero bubble cost in memory?",
    short="a pipeline's memory",
    columns=["case", "implementation", "time ms", "ratio to peer", BY_RANK, "tensors MiB", "verdict"],
    answer=fastest_and_smallest,
)
@pytest.mark.family("pipeline")
@pytest.mark.cases(DECODERS)
@pytest.mark.meshes("pp=4", smoke=["pp=2"])
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: DecoderCase, mesh: Mesh, measure: Measure) -> None:
    case = replace(case, ranks=mesh.size)
    measure(
        PipelinedStep,
        implementation,
        case,
        world_size=mesh.size,
        work=work_of(SIZES[case.model], case.micro_batches * case.rows * case.context, case.context),
        time=implementation.races.get("stages"),
        observe=[Spans()],
        slack=1.02,
    )


ROWS = Grid(
    smoke=[MeshCase("tiny-deep", batch=8, context=32)],
    laptop=[MeshCase("mini-deep", batch=16, context=64)],
    paper=[MeshCase("medium", batch=16, context=1024)],
)
"""`batch` is of all ranks, which divide it."""


@pytest.mark.question(
    "Is a pipeline faster than full sharding, on the same ranks and rows?",
    short="pipelines",
    columns=["case", "implementation", "time ms", "tokens/s", "sent by axis MiB", "tensors MiB", "verdict"],
    answer=most(
        lambda entry: entry["extra_info"]["work"].get("tokens_per_second"),
        "{name} trains most tokens in a second, {value:,.0f}",
    ),
)
@pytest.mark.family("mesh")
@pytest.mark.cases(ROWS)
@pytest.mark.meshes("pp=4", "shard=4", smoke=["pp=2", "shard=2"])
@pytest.mark.benchmark(min_rounds=9)
def test_beside_full_sharding(implementation: Implementation, case: MeshCase, mesh: Mesh, measure: Measure) -> None:
    case = replace(case, mesh=mesh.spec, batch=case.batch // mesh.row_groups)
    measure_step(measure, implementation, case, mesh)
