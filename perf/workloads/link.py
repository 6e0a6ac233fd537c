"""The halves of a data-parallel training step: computation alone, and communication alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.training_step.cases import TrainingStepCase
from perf.workloads.ranks import RankStep, language_model
from shardmark.grid import MB
from shardmark.plan import Mark
from shardmark.registry import Implementation

DEFAULT_BUCKET_MB = 25


class Compute(RankStep):
    """A training step of this rank alone: nothing is communicated."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The model itself, and the optimizer that it has in DataParallelStep."""
        model = language_model(case)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Communication:
    """All-reduce as many bytes as the model has gradients, in buckets of the case's size, and compute nothing."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        size = sum(parameter.numel() for parameter in language_model(case).parameters())
        bucket = (case.bucket_mb or DEFAULT_BUCKET_MB) * MB // 4
        self.buckets = torch.zeros(size, device=device).split(bucket)

    def prepare(self) -> None:
        """Zeros stay zeros."""

    def step(self, mark: Mark) -> None:
        """All buckets at once, as none has to wait for its gradients."""
        for handle in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
            handle.wait()
