"""The cases of a training step whose optimizer is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase


@dataclass(frozen=True)
class ShardedStepCase(TrainingStepCase):
    """One step whose optimizer is spread over `ranks`, which its memory depends on."""

    ranks: int = 2


SHARDED_OPTIMIZER = Grid(
    smoke=[ShardedStepCase("tiny", batch=2, context=32)],
    laptop=[ShardedStepCase("mini", batch=2, context=32)],
    paper=[ShardedStepCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)
