"""Where does the memory of a training step go: bytes by kind through the step, and by module and operator?

On CPU the bytes that forward saves for backward must be the predicted ones, operator by operator. On CUDA the CPU's
prediction stands beside the meter and is not judged: kernels there choose the layout of their outputs.
"""

from __future__ import annotations

import pytest

from impl.training_step.accounting import work
from impl.training_step.cases import CONTEXTS, DTYPES, STEP_MODES, TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api import Grid, Implementation
from shardmark.meter.plan import Plan
from shardmark.plugin.measure import Measure
from shardmark.predict import kept_for_backward
from shardmark.report.observed_answers import largest_kinds
from shardmark.report.plots import MEMORY_BY_KIND
from shardmark.rows.observers import Timeline

STEP_MEMORY = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[
        TrainingStepCase("mini", batch=4, context=128),
        TrainingStepCase("mini", batch=4, context=128, dtype="bfloat16"),
        TrainingStepCase("tiny", batch=4, context=1024),
    ],
    paper=[
        TrainingStepCase("2.7b", batch=4, context=512, dtype=dtype, mode=mode)
        for dtype in DTYPES[:2]
        for mode in STEP_MODES[::2]
    ],
    full=[
        TrainingStepCase("2.7b", batch=4, context=context, dtype=dtype, mode=mode)
        for context in CONTEXTS
        for dtype in DTYPES[:2]
        for mode in STEP_MODES
    ],
)


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question(
    "Where does the memory of a training step go?",
    short="a step's memory",
    answer=largest_kinds,
    plots=[MEMORY_BY_KIND],
)
@pytest.mark.cases(STEP_MEMORY)
def test_where_memory_goes(
    implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure
) -> None:
    expected = kept_for_backward(Plan(LanguageModelStep, implementation, None, case, "cpu", 1))
    row = measure(LanguageModelStep, implementation, case, work=work(case), slack=1.02, observe=[Timeline(expected)])
    if row["device"] == "cpu":
        for kept in row["memory"]["activations"]:
            assert kept["bytes"] == pytest.approx(kept["formula"], rel=0.02), f"{kept['module']} {kept['operator']}"
