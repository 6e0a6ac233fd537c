"""Activation checkpointing's cases."""

from __future__ import annotations

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase

CHECKPOINTING = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=64)],
    laptop=[TrainingStepCase("deep", batch=2, context=256)],
    paper=[
        TrainingStepCase(model, batch=4, context=context)
        for model in ("medium", "large", "xl")
        for context in (1024, 2048)
    ],
)
