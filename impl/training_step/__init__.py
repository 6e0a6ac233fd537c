"""The training step of a language model on one device, and the ways to put it together: eager and compiled.

step = EagerStep(model, optimizer, precision=PRECISIONS["bfloat16"])
loss = step(tokens, targets)
optimizer.zero_grad()
"""

from __future__ import annotations

from impl.training_step.contract import TrainingStep

# They register in this order, simplest first, as every list and table has them.
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
