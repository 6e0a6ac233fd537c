"""A training step with parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.collectives import Collectives
from impl.collectives.library import Backend
from impl.fsdp import flat_parameters, with_blocks
from impl.fsdp.cases import FSDPCase
from impl.training_step.cases import TrainingStepCase
from impl.training_step.models import made
from impl.training_step.rank_step import RankStep
from shardmark.api import (
    Implementation,
    Made,
    Mark,
    OwnModelCase,
    Unsupported,
    has_device_memory,
    trains_own_model,
)


class FSDPStep(RankStep):
    """Every rank has shards of parameters, gradients and moments.

    Units of a language model are the blocks, the embedding and the output projection. The root module's unit has the
    final norm.
    """

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        options: dict[str, Any] = _dtypes(case)
        if isinstance(case, FSDPCase | OwnModelCase) and case.offload:
            options["cpu_offload"] = True
        if implementation.accepts("wrap"):
            options["wrap"] = with_blocks(self.made.blocks)
        model = implementation.adapted(self.made.module, **options)
        return model, self.made.optimizer(list(model.parameters()))

    def make(self, case: TrainingStepCase | OwnModelCase) -> Made:
        return made(case, casts=True)

    def clip(self, norm: float) -> None:
        """By the wrapper's own method, which knows the other ranks' shards; Unsupported where it has none."""
        if not hasattr(self.model, "clip_grad_norm_"):
            raise Unsupported("it has no method clip_grad_norm_")
        self.model.clip_grad_norm_(norm)


class OffloadStep(FSDPStep):
    """A step with offload, or the same one without, on a device that has memory of its own."""

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        if not has_device_memory(next(self.made.module.parameters()).device):
            raise Unsupported("on a CPU there is nowhere to offload to; --simulate h100-80gb:8 predicts")
        return super().build(implementation, case)


def _backend(group: dist.ProcessGroup | None = None) -> Collectives:
    return Backend()


class FSDPStepByBackend(FSDPStep):
    """Our FSDP gathers by the backend's own collective too: a ring of messages is no all-gather that a meter sees."""

    def step(self, mark: Mark) -> None:
        ours, flat_parameters.collectives_for = flat_parameters.collectives_for, _backend
        try:
            super().step(mark)
        finally:
            flat_parameters.collectives_for = ours


def _dtypes(case: TrainingStepCase | OwnModelCase) -> dict[str, torch.dtype | None]:
    """The dtypes of computation and reduction; None for the parameters' own. Gradients of a user's own model are summed
    in float32, as is usual."""
    if not isinstance(case, OwnModelCase):
        return {"compute_dtype": None if case.dtype == "float32" else getattr(torch, case.dtype)}
    asked = case.recipe.compute_dtype
    return {"compute_dtype": getattr(torch, asked), "reduce_dtype": torch.float32} if asked else {"compute_dtype": None}


trains_own_model("fsdp", FSDPStep, on_ranks=True, zero_stage=3)
