"""A case of a training step whose optimizer is sharded over the ranks: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase


@dataclass(frozen=True)
class ShardedStepCase(TrainingStepCase):
    """One step whose optimizer is sharded over that many `ranks`."""

    ranks: int = 2
