"""The data-parallel training step, and its all-reduces without the step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.collectives.cases import CollectiveCase, in_units
from impl.data_parallel.cases import ReductionCase
from impl.training_step.cases import TrainingStepCase
from impl.training_step.micro_batches import accumulate
from impl.training_step.rank_step import RankStep
from shardmark.api import Implementation, Mark, trains_own_model


@dataclass(frozen=True)
class OverheadCase(CollectiveCase):
    """All-reduces of float32 tensors of `kilobytes` each, up to `size` bytes. Their times give overhead and
    bandwidth, and so the expected cost of each of `bucket_sizes` (MB) in the training step of `model`."""

    model: str = "tiny"
    bucket_sizes: tuple[int, ...] = ()
    kilobytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}-all_reduces"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"for all-reduces of up to {in_units(self.size, ' ')}"


class DataParallelStep(RankStep):
    """A copy of the model and of the optimizer on every rank."""

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        reduce_dtype = getattr(torch, case.reduce_dtype) if isinstance(case, ReductionCase) else None
        asked = {"bucket_mb": case.bucket_mb, "reduce_dtype": reduce_dtype}
        options = {k: v for k, v in asked.items() if v is not None and implementation.accepts(k)}  # the peer may not
        model = implementation.adapted(self.made.module, **options)
        return model, self.made.optimizer(list(model.parameters()))

    def step(self, mark: Mark) -> None:
        """A wrapper that takes the optimizer updates one bucket's parameters while the next are being reduced."""
        takes_optimizer = "optimizer" in inspect.signature(self.model.finish_gradient_synchronization).parameters
        if not takes_optimizer or self.recipe.clip is not None:  # the norm is that of all gradients
            super().step(mark)
            return
        accumulate(partial(self.forward_and_backward, mark), self.recipe.micro_batches, self.model)
        before = self.optimizer.register_step_pre_hook(lambda *_: mark("communication"))
        after = self.optimizer.register_step_post_hook(lambda *_: mark("optimizer"))
        self.model.finish_gradient_synchronization(self.optimizer)
        before.remove()
        after.remove()

    def compute_step(self, mark: Mark) -> None:
        """Forward and backward without communication, and without a step, so that the ranks' parameters stay equal."""
        with self.model.no_sync():
            self.forward_and_backward(mark)


class AllReduces:
    """One all-reduce of each size, the smallest first."""

    def __init__(self, implementation: Implementation, case: OverheadCase, device: str) -> None:
        self.collectives = implementation.adapted
        self.backend = dist.get_backend()
        self.tensors = {size: torch.zeros(size * 1024 // 4, device=device) for size in sorted(case.kilobytes)}

    def prepare(self) -> None:
        """Nothing to reset: sums of zeros are zeros."""

    def step(self, mark: Mark) -> None:
        for size, tensor in self.tensors.items():
            self.collectives.all_reduce(tensor, async_op=True).wait()
            mark(f"{size} KB")


trains_own_model("data_parallel", DataParallelStep, on_ranks=True)
