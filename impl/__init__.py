"""What is measured: one folder per family, one file per implementation, registered where it is defined."""

from impl import (
    attention,
    checkpointing,
    collectives,
    data_parallel,
    fsdp,
    loss,
    model,
    optim,
    sharded_optimizer,
    training_step,
)

__all__ = [
    "attention",
    "checkpointing",
    "collectives",
    "data_parallel",
    "fsdp",
    "loss",
    "model",
    "optim",
    "sharded_optimizer",
    "training_step",
]
