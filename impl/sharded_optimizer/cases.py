"""Cases of a training step whose optimizer is sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, OwnModelCase


@dataclass(frozen=True)
class ShardedStepCase(TrainingStepCase):
    """One step whose optimizer is sharded over `ranks` ranks."""

    ranks: int = 2


CASES = Grid(
    smoke=[ShardedStepCase("tiny", batch=2, context=32)],
    laptop=[ShardedStepCase("mini", batch=2, context=32)],
    paper=[ShardedStepCase(model, batch=4, context=512, dtype="bfloat16") for model in ("medium", "xl")],
    full=[
        ShardedStepCase(model, batch=4, context=512, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for model in ("small", "medium", "large", "xl")
    ],
    own=OwnModelCase.of,
)
