"""Where does the time of a training step go: which kernels, phase by phase, and inside attention what?

How long the step takes is timed without the profiler. The kernels are those of one more step under it: the profiler
slows the host, so their shares are what counts. On CPU a kernel is an operator, with its own time.
"""

from __future__ import annotations

import pytest

from impl.training_step.accounting import attention_flops, work
from impl.training_step.cases import CONTEXTS, MODELS, TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api import Grid, Implementation
from shardmark.plugin.measure import Measure
from shardmark.report.observed_answers import largest_parts
from shardmark.report.plots import TIME_BY_PART
from shardmark.rows.observers.attention_parts import AttentionProfile

STEP_KERNELS = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32, attention="eager")],
    laptop=[TrainingStepCase("mini", batch=4, context=128, attention=attention) for attention in ("eager", "sdpa")],
    paper=[
        *(TrainingStepCase("medium", batch=4, context=1024, attention=attention) for attention in ("eager", "sdpa")),
        TrainingStepCase("xl", batch=4, context=1024, attention="sdpa"),
    ],
    full=[
        TrainingStepCase(model, batch=4, context=context, attention=attention)
        for model in MODELS
        for context in CONTEXTS
        for attention in ("eager", "sdpa")
    ],
)
"""Eager attention shows its parts one by one."""


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question(
    "Where does the time of a training step go?",
    short="a step's time",
    columns=["case", "implementation", "time ms", "forward", "backward", "optimizer", "verdict"],
    answer=largest_parts,
    plots=[TIME_BY_PART],
)
@pytest.mark.cases(STEP_KERNELS)
def test_where_time_goes(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    measure(LanguageModelStep, implementation, case, work=work(case), observe=[AttentionProfile(attention_flops(case))])
