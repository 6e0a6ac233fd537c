"""The data-parallel training step's cases."""

from __future__ import annotations

from dataclasses import replace

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase

DATA_PARALLEL = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=64)],
    paper=[TrainingStepCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)

BUCKETS = Grid(
    smoke=[replace(DATA_PARALLEL.smoke[0], bucket_mb=bucket_mb) for bucket_mb in (1, 1000)],
    laptop=[replace(DATA_PARALLEL.laptop[0], bucket_mb=bucket_mb) for bucket_mb in (1, 10, 100, 1000)],
    paper=[replace(DATA_PARALLEL.paper[-1], bucket_mb=bucket_mb) for bucket_mb in (1, 10, 100, 1000)],
)
