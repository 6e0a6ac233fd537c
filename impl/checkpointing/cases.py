"""Cases of a training step under activation checkpointing: deep models, whose activations take most of the memory."""

from __future__ import annotations

from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, OwnModelCase

CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=64)],
    laptop=[TrainingStepCase("deep", batch=2, context=256)],
    paper=[TrainingStepCase(model, batch=4, context=1024) for model in ("medium", "xl")],
    full=[
        TrainingStepCase(model, batch=4, context=context)
        for model in ("medium", "large", "xl")
        for context in (1024, 2048)
    ],
    own=OwnModelCase.of,
)
