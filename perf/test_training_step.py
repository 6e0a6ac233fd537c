"""What does a training step cost on one device, by size, context and precision, and what do warm-ups hide?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from impl.training_step.accounting import work
from impl.training_step.cases import STEP_MODES, STEP_TIMES, TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api import Grid, Implementation, OwnModelCase, registry
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import timed_steps
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, Measured, Plan, Rounds
from shardmark.plugin.measure import Measure, memory_budget
from shardmark.ranks.world import World
from shardmark.report.answers import goals
from shardmark.report.observed_answers import warmed_up
from shardmark.report.plots import Lines
from shardmark.rows.observers import Goals, Observer
from shardmark.rows.observers.after_warmups import AfterWarmups, after_warmups
from shardmark.rows.row import Row

STEP_COMPILED = Grid(
    smoke=[],
    laptop=[TrainingStepCase("tiny", batch=4, context=128)],  # compiling takes longer than all else
    paper=[TrainingStepCase(model, batch=4, context=512, dtype="bfloat16") for model in ("small", "medium", "xl")],
    full=STEP_TIMES.at("full"),
)

STEP_WARMUPS = Grid(
    smoke=STEP_TIMES.smoke[-1:],
    laptop=[TrainingStepCase("mini", batch=4, context=128, mode=mode) for mode in STEP_MODES],
    paper=[TrainingStepCase("medium", batch=4, context=512)],
    full=[case for case in STEP_TIMES.at("full") if case.dtype == "float32"],
)


STEP_GOALS = Grid(smoke=[], laptop=[], paper=[TrainingStepCase("2.7b", batch=4, context=1024, dtype="bfloat16")])
"""Large enough that matrix products should keep the chip busy, as large as an H100's 80 GB allow (71 GB)."""

MFU = 0.4
"""Goal for that step, 85 TFLOP of the model: 215 ms on an H100 SXM (989 TFLOP/s, 3.35 TB/s). It can be reached.

Products at the three quarters of the peak that cuBLAS reaches take 115 ms; AdamW and the casts of weights and gradients
move 40 bytes for each of 2.7 billion parameters (32 ms); the 28 GB of activations are written and read some five times
(42 ms). Half of the peak, 172 ms, is less than this sum.
"""


COMPILED = "compile_model"

STEADY = Rounds(minimum=10, maximum=10, warmups=5)
WARMUPS = (0, 1, 2, 5)


def _measure(
    measure: Measure,
    implementation: Implementation,
    case: TrainingStepCase,
    observe: Sequence[Observer] = (),
) -> Row:
    return measure(
        LanguageModelStep,
        implementation,
        case,
        work=work(case),
        rates=lambda seconds: {} if isinstance(case, OwnModelCase) else {"tokens_per_second": case.tokens / seconds},
        rounds=STEADY,
        observe=observe,
    )


HOW_LONG = pytest.mark.question(
    "How long does a training step take, and what memory does it need?",
    short="training step",
    columns=["case", "implementation", "time ms", "tokens/s", "MFU", "tensors MiB", "verdict"],
    plots=[Lines("Tokens per second by context", "case.context", "work.tokens_per_second", "", "context", "tokens/s")],
)


@pytest.mark.family("training_step", only=("eager",))
@HOW_LONG
@pytest.mark.cases(STEP_TIMES)
def test_training_step(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.family("training_step", only=(COMPILED,))
@HOW_LONG
@pytest.mark.cases(STEP_COMPILED)
def test_compiled(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question(
    "What do warm-ups hide?",
    short="warm-ups",
    columns=["case", "implementation", *(after_warmups(count) for count in WARMUPS)],
    answer=warmed_up,
)
@pytest.mark.cases(STEP_WARMUPS)
def test_warmups(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    """Ten rounds after 0, 1, 2 and 5 warm-ups, of one sequence of steps in a process that has run nothing before."""
    plan = Plan(LanguageModelStep, implementation, None, case, device, 1)
    count = max(WARMUPS) + STEADY.minimum

    def in_a_fresh_process() -> list[list[Laps]]:
        with World(1, device) as fresh:
            return fresh.run(timed_steps, plan, count, deadline=measure.deadline)

    [laps] = measure.attempt(plan.identity, memory_budget(implementation, case, device), in_a_fresh_process)
    seconds = {n: [lap.seconds for lap in laps[n : n + STEADY.minimum]] for n in WARMUPS}
    steady = Measured(implementation.name, Memory(), {IMPLEMENTATION: laps[-STEADY.minimum :]})
    measure.record(plan.identity, [steady], observe=[AfterWarmups(seconds)])


@pytest.mark.question(
    "Does the training step reach its goal?",
    short="training step's goal",
    columns=["case", "implementation", "time ms", "tokens/s", "MFU", "goal", "verdict"],
    answer=goals,
)
@pytest.mark.cases(STEP_GOALS)
@pytest.mark.parametrize("name", [COMPILED, "compile_all_options"])
def test_goals(case: TrainingStepCase, name: str, device: str, measure: Measure) -> None:
    """The goal is a share of the chip's published FLOP/s. All compiler options together are shown and not judged."""
    implementation = registry.resolve("training_step", name)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    _measure(measure, implementation, case, [Goals(mfu=MFU)] if name == COMPILED else [])
