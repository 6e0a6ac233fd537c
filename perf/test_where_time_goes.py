"""Where does the time of a training step go: which kernels, phase by phase, and inside attention what?

How long the step takes is timed without the profiler. The kernels are those of one more step under it: the profiler
slows the host, so their shares are what counts. On CPU a kernel is an operator, with its own time.
"""

from __future__ import annotations

from typing import Any

import pytest

from impl.training_step.accounting import attention_flops, work
from impl.training_step.cases import TrainingStepCase
from perf.workloads.training_step import CONTEXTS, MODELS, LanguageModelStep
from shardmark.grid import Grid
from shardmark.kernels import StepProfile, attention_parts
from shardmark.measure import Measure
from shardmark.registry import Implementation

STEP_KERNELS = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32, attention="eager")],
    laptop=[TrainingStepCase("mini", batch=4, context=128, attention=attention) for attention in ("eager", "sdpa")],
    paper=[
        TrainingStepCase(model, batch=4, context=context, attention=attention)
        for model in MODELS
        for context in CONTEXTS
        for attention in ("eager", "sdpa")
    ],
)
"""Eager attention shows its parts one by one."""


def inside_attention(profile: StepProfile, case: TrainingStepCase) -> dict[str, dict[str, float]]:
    """Seconds and FLOPs of attention's parts in all layers' forward, where they are seen: not in a fused kernel."""
    flops = attention_flops(case)
    parts = attention_parts(profile.inside(".attention", "forward"))
    return {name: {"seconds": seconds, "flops": flops[name]} for name, seconds in parts.items()}


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question("Where does the time of a training step go?")
@pytest.mark.cases(STEP_KERNELS)
def test_where_time_goes(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    def kernels(profile: StepProfile) -> dict[str, Any]:
        return {"phases": profile.as_row(), "attention": inside_attention(profile, case)}

    measure(LanguageModelStep, implementation, case, work=work(case), profiled=kernels)
