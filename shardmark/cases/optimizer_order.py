"""The case of an optimizer made before or after its model is sharded."""

from __future__ import annotations

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase

OPTIMIZER_ORDER = Grid(
    smoke=[TrainingStepCase("mlp-tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mlp-mini", batch=2, context=64)],
    paper=[TrainingStepCase("mlp-1024", batch=4, context=256)],
)
