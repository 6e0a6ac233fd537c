"""The training step of a language model on one device: eager, checkpointed and compiled.

    step = EagerStep(model, optimizer, precision=PRECISIONS["bfloat16"])
    loss = step(tokens, targets)
    optimizer.zero_grad()

`step.forward`, `step.backward` and `step.update` are its parts.
"""

from __future__ import annotations

from impl.training_step.contract import TrainingStep

# Implementations register in this order, simplest first, which is the order in every list and table.
# isort: off
from impl.training_step.eager import EagerStep
from impl.training_step.checkpointed import CheckpointedStep
from impl.training_step.compiled import CompileForwardBackward, CompileModel, CompileStep
# isort: on

__all__ = [
    "CheckpointedStep",
    "CompileForwardBackward",
    "CompileModel",
    "CompileStep",
    "EagerStep",
    "TrainingStep",
]
