"""A training step with parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from impl.fsdp import with_blocks
from impl.training_step.cases import TrainingStepCase
from impl.training_step.rank_step import RankStep
from shardmark.api import Implementation, OwnModelCase, trains_own_model


class FSDPStep(RankStep):
    """Every rank has shards of parameters, gradients and moments.

    Units of a language model are the blocks, the embedding and the output projection. The root module's unit has the
    final norm.
    """

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        # AdamW is fused, so that the optimizer itself needs no temporaries.
        own_dtype = case.dtype == "float32" or isinstance(case, OwnModelCase)
        compute = None if own_dtype else getattr(torch, case.dtype)
        units = {"wrap": with_blocks(self.made.blocks)} if implementation.accepts("wrap") else {}
        model = implementation.adapted(self.made.module, compute_dtype=compute, **units)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


trains_own_model("fsdp", FSDPStep, on_ranks=True, strategies=(("fsdp2", False), ("fsdp2", True)), zero_stage=3)
