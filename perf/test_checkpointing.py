"""What does activation checkpointing save, and what does it cost?"""

from __future__ import annotations

import pytest

from impl.checkpointing.cases import CASES
from impl.training_step.accounting import work
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import CheckpointedStep
from shardmark.api import Implementation, OwnModelCase
from shardmark.plugin.measure import Measure
from shardmark.report.answers import saves
from shardmark.report.plots import MEMORY
from shardmark.rows.columns import Column

RECOMPUTED = Column(
    "recomputed", lambda entry, row: f"{row['work']['recomputed']:.0%}" if "recomputed" in row["work"] else None
)
"""FLOPs that the policy computes again, as a share of the step's."""


@pytest.mark.family("checkpointing")
@pytest.mark.question(
    "What does activation checkpointing save, and what does it cost?",
    short="checkpointing",
    columns=["case", "implementation", "time ms", RECOMPUTED, "ratio to peer", "tensors MiB", "verdict"],
    answer=saves(),
    plots=[MEMORY],
)
@pytest.mark.cases(CASES)
def test_training_step(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    once = work(case)
    policy = None if isinstance(case, OwnModelCase) else implementation.facts  # its formulas; None for a user's own
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
