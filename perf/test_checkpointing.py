"""What does activation checkpointing save, and what does it cost?"""

from __future__ import annotations

import pytest

from impl.accounting.checkpointing import POLICIES
from impl.accounting.training_step import work
from perf.test_training_step import LanguageModelStep
from shardmark import cases, registry
from shardmark.cases import TrainingStepCase
from shardmark.measure import Measure
from shardmark.registry import Implementation


class CheckpointedStep(LanguageModelStep):
    """The eager step under a policy."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        super().__init__(registry.resolve("training_step", "eager"), case, device)
        implementation.adapted(self.model)
        self.backend = implementation.name


@pytest.mark.family("checkpointing")
@pytest.mark.question("What does activation checkpointing save, and what does it cost?")
@pytest.mark.cases(cases.CHECKPOINTING)
def test_training_step(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    once = work(case)
    policy = POLICIES.get(implementation.name)  # a user's own is not known
    row = measure(
        CheckpointedStep,
        implementation,
        case,
        work=once,
        slack=1.02,
        rates=lambda seconds: {} if policy is None else {"recomputed": policy.recomputed(case) / once.flops},
    )
    if device == "cpu" and policy is not None:  # not an upper bound alone; on CUDA the formula has not been met yet
        assert row["memory"]["tensors"] >= 0.98 * row["memory"]["formula"], "the formula is more than 2% over the peak"
