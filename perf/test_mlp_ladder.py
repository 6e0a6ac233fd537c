"""What does each rung of the ladder change, from nothing to everything compiled, in time and in memory?"""

from __future__ import annotations

import pytest

from impl.accounting.training_step import work
from perf.test_training_step import LanguageModelStep
from shardmark import cases, registry
from shardmark.cases import Rung, TrainingStepCase
from shardmark.measure import Measure
from shardmark.registry import Implementation

pytestmark = pytest.mark.question("What does each rung of the ladder change?")


class LadderStep(LanguageModelStep):
    """One AdamW step of the MLP language model, over random tokens."""

    cold = True


def _measure(measure: Measure, implementation: Implementation, case: TrainingStepCase) -> None:
    measure(
        LadderStep,
        implementation,
        case,
        work=work(case),
        rates=lambda seconds: {"tokens_per_second": case.tokens / seconds},
    )


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.cases(cases.MLP_LADDER)
def test_first_rungs(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.cases(cases.MLP_RUNGS)
def test_rungs_above(case: Rung, device: str, measure: Measure) -> None:
    implementation = registry.resolve("training_step", case.implementation)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    _measure(measure, implementation, case.case)
