"""A training step with parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from impl.fsdp import by_type
from impl.model.layers import Block
from impl.model.mlp import MLPBlock
from impl.training_step.cases import TrainingStepCase
from perf.workloads.ranks import RankStep, language_model
from shardmark.registry import Implementation

UNITS = by_type(Block, MLPBlock, nn.Embedding, nn.Linear)
"""A unit for each block, the embedding and the output projection; the final norm is in the root module's unit."""


class FSDPStep(RankStep):
    """Every rank has shards of parameters, gradients and moments."""

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        # AdamW is fused, so that the optimizer itself needs no temporaries.
        compute = getattr(torch, case.dtype) if case.dtype != "float32" else None
        units = {"wrap": UNITS} if implementation.accepts("wrap") else {}
        model = implementation.adapted(language_model(case), compute_dtype=compute, **units)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
