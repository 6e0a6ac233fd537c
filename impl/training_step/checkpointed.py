"""The eager step of a model whose blocks keep only their inputs and run forward again in backward."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from impl.checkpointing import full
from impl.precision import FLOAT32, Precision
from impl.training_step.accounting import checkpointed_peak
from impl.training_step.eager import EagerStep
from shardmark.registry import Race, register


class CheckpointedStep(EagerStep):
    """Contract and errors: `impl.training_step.TrainingStep`; the model has `blocks`, as `impl.checkpointing` says."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(full(model), optimizer, precision=precision)


register("training_step", "checkpointed", CheckpointedStep, memory=checkpointed_peak, time=Race("eager"))
