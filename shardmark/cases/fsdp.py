"""The cases of a training step with everything sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase


@dataclass(frozen=True)
class FSDPCase(TrainingStepCase):
    """One step with everything sharded over `ranks`, which its memory depends on.

    `dtype` is what parameters are cast to before they are gathered and gradients before they are reduced; shards,
    their gradients and the optimizer stay in float32.
    """

    ranks: int = 2


FSDP = Grid(
    smoke=[FSDPCase("tiny", batch=2, context=32)],
    laptop=[FSDPCase("mini", batch=2, context=32)],
    paper=[FSDPCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)

FSDP_LOW_PRECISION = Grid(
    smoke=[],
    laptop=[replace(case, dtype="bfloat16") for case in FSDP.laptop],
    paper=[replace(case, dtype="bfloat16") for case in FSDP.paper],
)
