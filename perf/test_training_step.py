"""What does a training step cost on one device, by size, context and precision, and what do warm-ups hide?"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, stdev

import pytest
import torch

from impl.accounting.training_step import work
from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.precision import PRECISIONS
from shardmark import cases, registry
from shardmark.cases import TrainingStepCase
from shardmark.clock import Laps
from shardmark.measure import CASE_DEADLINE, Measure
from shardmark.memory import Memory
from shardmark.passes import timed_steps
from shardmark.plan import IMPLEMENTATION, Mark, Measured, Plan, Rounds
from shardmark.registry import Implementation
from shardmark.rows import Row
from shardmark.world import World

COMPILED = "compile_model"

STEADY = Rounds(minimum=10, maximum=10, warmups=5)
WARMUPS = (0, 1, 2, 5)


class LanguageModelStep:
    """One AdamW step of a language model, or the part of it that the case names, over random tokens."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = implementation.name
        self.case = case
        precision = PRECISIONS[case.dtype]
        with torch.device(device):
            self.model = _language_model(case).to(precision.parameter)
            shape = case.batch, case.context
            self.tokens, self.targets = (torch.randint(self.model.size.vocab, shape) for _ in range(2))
        # Fused, so that the optimizer itself needs no temporaries.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.training_step = implementation.adapted(self.model, self.optimizer, precision=precision)
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Let go of the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        """The part that the case names."""
        if self.case.mode == "step":
            self.training_step(self.tokens, self.targets, mark)
            return
        self.loss = self.training_step.forward(self.tokens, self.targets)
        mark("forward")
        if self.case.mode == "forward_backward":
            self.training_step.backward(self.loss)
            mark("backward")


def _language_model(case: TrainingStepCase) -> Transformer | MLPLanguageModel:
    if case.model in MLP_SIZES:
        return MLPLanguageModel(MLP_SIZES[case.model])
    attention = registry.resolve("attention", case.attention).adapted
    return Transformer(SIZES[case.model], context_length=case.context, attention=attention)


def _measure(
    measure: Measure,
    implementation: Implementation,
    case: TrainingStepCase,
    goals: Mapping[str, float] | None = None,
) -> Row:
    return measure(
        LanguageModelStep,
        implementation,
        case,
        work=work(case),
        rates=lambda seconds: {"tokens_per_second": case.tokens / seconds},
        rounds=STEADY,
        goals=goals,
    )


HOW_LONG = pytest.mark.question("How long does a training step take, and what memory does it need?")


@pytest.mark.family("training_step", only=("eager",))
@HOW_LONG
@pytest.mark.cases(cases.STEP_TIMES)
def test_training_step(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.family("training_step", only=(COMPILED,))
@HOW_LONG
@pytest.mark.cases(cases.STEP_COMPILED)
def test_compiled(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question("What do warm-ups hide?")
@pytest.mark.cases(cases.STEP_WARMUPS)
def test_warmups(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    """Ten rounds after 0, 1, 2 and 5 warm-ups, of one sequence of steps in a process that has run nothing before."""
    plan = Plan(LanguageModelStep, implementation, None, case, device, 1, STEADY)
    count = max(WARMUPS) + STEADY.minimum

    def in_a_fresh_process(plan: Plan) -> list[list[Laps]]:
        with World(1, device) as fresh:
            return fresh.run(timed_steps, plan, count, deadline=CASE_DEADLINE)

    [laps] = measure.attempt(plan, in_a_fresh_process)
    seconds = {n: [lap.seconds for lap in laps[n : n + STEADY.minimum]] for n in WARMUPS}
    steady = Measured(implementation.name, Memory(), {IMPLEMENTATION: laps[-STEADY.minimum :]})
    after = {str(n): {"mean": fmean(values), "stddev": stdev(values)} for n, values in seconds.items()}
    measure.record(plan, [steady], times={"after_warmups": after})


@pytest.mark.question("Does the training step reach its goal?")
@pytest.mark.cases(cases.STEP_GOALS)
@pytest.mark.parametrize("name", [COMPILED, "compile_all_options"])
def test_goals(case: TrainingStepCase, name: str, device: str, measure: Measure) -> None:
    """Half of the chip's published FLOP/s; PyTorch's own best settings stand beside it and are not judged."""
    implementation = registry.resolve("training_step", name)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    _measure(measure, implementation, case, goals={"mfu": 0.5} if name == COMPILED else None)
