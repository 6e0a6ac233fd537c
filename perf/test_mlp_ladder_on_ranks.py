"""What does each rung of the ladder change on ranks, its parameters sharded by SimpleFSDP, in time and in memory?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from impl.fsdp.cases import RankRung
from impl.fsdp.ladder_workload import MLP_LADDER, RankLadderStep, shard_model
from impl.fsdp.simple_accounting import peak, peak_of_stages, stages, work
from impl.training_step.cases import TrainingStepCase
from perf.published import published
from shardmark.api import Grid, Implementation, registry, stage
from shardmark.meter.clock import Stopwatch
from shardmark.meter.memory import meter, release
from shardmark.meter.plan import Identity, Measured
from shardmark.plugin.measure import Measure, memory_budget
from shardmark.ranks.world import World
from shardmark.report.observed_answers import held_while_made
from shardmark.report.plots import MEMORY_BY_STAGE, Points
from shardmark.rows.observers import Compile, Stages

RANK_STEPS = ("eager", "compile_model", "compile_forward_backward", "compile_step")
_PAIRS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Dtypes that parameters are gathered in, and that gradients are reduced in."""


def _on_ranks(case: TrainingStepCase, *steps: str, checkpointed: bool = False) -> list[RankRung]:
    """A rung for each of `steps` and each pair of dtypes."""
    return [
        RankRung(case.model, case.batch, case.context, dtype, reduce_dtype=reduce, step=step, checkpointed=checkpointed)
        for dtype, reduce in _PAIRS
        for step in steps
    ]


_SHORT = replace(MLP_LADDER.laptop[0], model="mlp-short")

RANK_RUNGS = Grid(
    smoke=_on_ranks(MLP_LADDER.smoke[0], "eager")[:1],
    laptop=[
        *_on_ranks(_SHORT, *RANK_STEPS)[: len(RANK_STEPS)],
        *_on_ranks(_SHORT, "eager")[1:],
        *_on_ranks(_SHORT, "eager", checkpointed=True),
    ],
    paper=[
        *_on_ranks(MLP_LADDER.paper[0], "eager", "compile_step"),
        *_on_ranks(MLP_LADDER.paper[0], "eager", checkpointed=True),
    ],
    full=[
        rung
        for case in MLP_LADDER.at("full")[::2]
        for checkpointed in (False, True)
        for rung in _on_ranks(case, *RANK_STEPS, checkpointed=checkpointed)
    ],
)
"""Placements of the compiler, with and without checkpointing, by the dtypes of parameters and of reductions. At laptop
scale each placement once, and a model of one block, as nearly all of the time there is the compiler's.
"""


def _made(case: RankRung) -> list[RankRung]:
    return [replace(case, meta=meta) for meta in (False, True)]


RANK_STAGES = Grid(
    smoke=_made(RANK_RUNGS.smoke[0]),
    laptop=_made(RANK_RUNGS.laptop[0]),
    paper=_made(RANK_RUNGS.paper[0]),
    full=[case for model in MLP_LADDER.at("full")[::2] for case in _made(_on_ranks(model, "eager")[0])],
)
"""One rung of each model, made whole and made on meta."""


SLACK = 1.02


def on_ranks(
    case: RankRung, world: World, device: str, memory: Callable[[Any], int]
) -> tuple[Implementation, RankRung]:
    """The training step that the case names, held to that formula, and the case on as many ranks as there are."""
    implementation = registry.resolve("training_step", case.step)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    return replace(implementation, memory=memory), replace(case, ranks=world.size)


@pytest.mark.question(
    "What does each rung of the ladder change on ranks?",
    short="ladder on ranks",
    columns=["case", "implementation", "time ms", "compile s", "tokens/s", "tensors MiB", "verdict"],
    plots=[
        Points(
            "The rungs on ranks, ours and as published",
            ours={"step time": "stats.median", "peak memory": "memory.peak"},
            units={"step time": "s", "peak memory": "B"},
            published=published("simple_pytorch", "MLP ladder, vocab", "data_parallel"),
        )
    ],
)
@pytest.mark.cases(RANK_RUNGS)
def test_rungs_on_ranks(case: RankRung, world: World, device: str, measure: Measure) -> None:
    implementation, case = on_ranks(case, world, device, peak)
    measure(
        RankLadderStep,
        implementation,
        case,
        work=work(case),
        world_size=world.size,
        slack=SLACK,
        rates=lambda seconds: {"tokens_per_second": case.ranks * case.tokens / seconds},
        observe=[Compile()],
    )


def made(case: RankRung, device: str) -> Measured:
    """One rank's bytes after each stage of making the model, and its times."""
    release(device)
    mesh, watch = init_device_mesh(device, (case.ranks,)), Stopwatch(device)
    with meter(device) as memory:
        watch.start()
        shard_model(case, mesh, stage)
        laps = watch.stop()
    return Measured.once(dist.get_backend(), memory, [laps])


STAGES = ("model", "data_parallel", "to_empty", "init_weights")


@pytest.mark.question(
    "What does a rank hold while the model is made?",
    short="making the model",
    answer=held_while_made,
    plots=[
        MEMORY_BY_STAGE,
        Points(
            "Memory after each stage, ours and as published",
            ours={f"memory after {stage}": f"memory.stages.{stage}.live" for stage in STAGES},
            units={f"memory after {stage}": "B" for stage in STAGES},
            published=published("simple_pytorch", "meta init"),
        ),
    ],
)
@pytest.mark.cases(RANK_STAGES)
def test_stages(case: RankRung, world: World, device: str, measure: Measure) -> None:
    implementation, case = on_ranks(case, world, device, peak_of_stages)
    family, name = implementation.family, implementation.name
    identity = Identity(family, name, case, device, world.size, called=implementation.called)
    memory, expected = memory_budget(implementation, case, device, SLACK), stages(case)
    ranks = measure.attempt(identity, memory, lambda: world.run(made, case, device))
    row = measure.record(identity, ranks, memory=memory, observe=[Stages(expected)])
    for name, held in row["memory"]["stages"].items():
        assert held["live"] <= SLACK * expected[name], name
