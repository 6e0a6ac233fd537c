"""The eager step with full activation checkpointing: each block saves only its input, and backward recomputes it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from impl.checkpointing import full
from impl.training_step.accounting import checkpointed_peak
from impl.training_step.eager import EagerStep
from shardmark.api import Race, register


class CheckpointedStep(EagerStep):
    """Contract and errors: `impl.training_step.TrainingStep`. The model has `blocks`, see `impl.checkpointing`; they
    draw random numbers by torch's dropout modules alone: `nn.MultiheadAttention`, which draws its own, is not taken."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(full(model), optimizer, **options)


register(
    "training_step",
    "checkpointed",
    CheckpointedStep,
    memory=checkpointed_peak,
    time=Race("eager"),
    called="the checkpointed step",
)
