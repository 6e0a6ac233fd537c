"""Training on a mesh of ranks: copies, shards, slices and parts of one model, judged against one process.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    trainer = MeshTrainer(parallelize, model_fn, optimizer_fn, mesh, max_norm=1.0)
    loss, norm = trainer.step(micro_batches)

`naive` gathers every batch and trains as one process on each rank. `MeshTrainer` is the suite's own step around any
`parallelize(model, mesh)`, such as `replicated` (copies of the model) and PyTorch's own `library`.
"""

from __future__ import annotations

from impl.mesh.contract import Trainer, adapted
from impl.mesh.decoder import Decoder, DecoderSize, token_losses
from impl.mesh.objective import Objective, mean_of
from impl.mesh.trainer import MeshTrainer, by_mesh

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.mesh.naive import OneProcess
from impl.mesh.replicated import replicated
from impl.mesh.library import torch_parallel
from impl.mesh.pipelined import PipelinedTrainer
# isort: on

__all__ = [
    "Decoder",
    "DecoderSize",
    "MeshTrainer",
    "Objective",
    "OneProcess",
    "PipelinedTrainer",
    "Trainer",
    "adapted",
    "by_mesh",
    "mean_of",
    "replicated",
    "token_losses",
    "torch_parallel",
]
