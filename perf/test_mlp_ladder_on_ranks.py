"""What does each rung of the ladder change on ranks, its parameters spread by SimpleFSDP, in time and in memory?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from impl.accounting.simple_fsdp import peak, peak_of_stages, stages, work
from impl.checkpointing import full
from impl.fsdp.simple import data_parallel, init_weights
from perf.ranks import RankStep, language_model, told_by_stages
from shardmark import cases, registry
from shardmark.budget import MemoryBudget
from shardmark.cases import RankRung
from shardmark.clock import Stopwatch
from shardmark.measure import Measure
from shardmark.memory import meter, release, stage
from shardmark.plan import Mark, Measured, Plan, Rounds
from shardmark.registry import Implementation
from shardmark.world import World

SLACK = 1.02


def spread(case: RankRung, mesh: DeviceMesh, tell: Callable[[str], None] = lambda name: None) -> nn.Module:
    """The case's model over the ranks; `tell` hears of each stage as it ends."""
    device = mesh.device_type
    with torch.device("meta" if case.meta else device):
        model = language_model(case)
    tell("model")
    dtypes = {name: getattr(torch, dtype) for name, dtype in (("param", case.dtype), ("reduce", case.reduce_dtype))}
    policy = MixedPrecisionPolicy(param_dtype=dtypes["param"], reduce_dtype=dtypes["reduce"])
    data_parallel(model, mesh, mp_policy=policy)
    tell("data_parallel")
    if case.meta:
        model.to_empty(device=device)
        tell("to_empty")
        init_weights(model)
        tell("init_weights")
    return model


class RankLadderStep(RankStep):
    """One AdamW step of the MLP language model, its parameters spread, as that implementation does it."""

    cold = True

    def spread(self, implementation: Implementation, case: Any) -> tuple[Any, Optimizer]:
        """AdamW is fused, so that the optimizer itself needs no temporaries."""
        model = spread(case, init_device_mesh(torch.get_default_device().type, (case.ranks,)))
        if case.checkpointed:
            full(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.training_step = implementation.adapted(model, optimizer)
        return model, optimizer

    def step(self, mark: Mark) -> None:
        """All communication is within forward and backward."""
        self.training_step(self.tokens, self.targets, mark)


def on_ranks(
    case: RankRung, world: World, device: str, memory: Callable[[Any], int]
) -> tuple[Implementation, RankRung]:
    """The training step that the case names, held to that formula, and the case on as many ranks as there are."""
    implementation = registry.resolve("training_step", case.step)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    return replace(implementation, memory=memory), replace(case, ranks=world.size)


@pytest.mark.question("What does each rung of the ladder change on ranks?")
@pytest.mark.cases(cases.RANK_RUNGS)
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
    )


def made(plan: Plan) -> Measured:
    """One rank's bytes after each stage of making the model, and its times."""
    release(plan.device)
    mesh, watch = init_device_mesh(plan.device, (plan.world_size,)), Stopwatch(plan.device)
    with meter(plan.device) as memory:
        watch.start()
        spread(plan.case, mesh, stage)
        laps = watch.stop()
    return told_by_stages(memory, [laps])


@pytest.mark.question("What does a rank hold while the model is made?")
@pytest.mark.cases(cases.RANK_STAGES)
def test_stages(case: RankRung, world: World, device: str, measure: Measure) -> None:
    implementation, case = on_ranks(case, world, device, peak_of_stages)
    plan = Plan(RankLadderStep, implementation, None, case, device, world.size, Rounds())
    ranks = measure.attempt(plan, lambda plan: world.run(made, plan), SLACK)
    expected = stages(case)
    row = measure.record(plan, ranks, memory_budget=MemoryBudget(peak_of_stages(case), SLACK), stages=expected)
    for name, held in row["memory"]["stages"].items():
        assert held["live"] <= SLACK * expected[name], name
