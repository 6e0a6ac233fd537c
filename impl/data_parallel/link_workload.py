"""A data-parallel training step beside its two halves: its computation alone, and its communication alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.data_parallel.workload import DataParallelStep
from impl.training_step.cases import TrainingStepCase
from impl.training_step.link_workload import BesideHalves
from impl.training_step.models import language_model
from impl.training_step.rank_step import RankStep
from shardmark.api import MB, Implementation, Mark

DEFAULT_BUCKET_MB = 25


class Compute(RankStep):
    """Each rank's training step without communication; the optimizer is that of `DataParallelStep`."""

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        model = self.made.module
        return model, self.made.optimizer(list(model.parameters()))

    def compute_gradients(self, mark: Mark) -> None:
        """Gradients stay on their rank."""
        self.forward_and_backward(mark)


class Communication:
    """All-reduces of as many bytes as the model has gradients, in buckets of the case's size."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        size = sum(parameter.numel() for parameter in language_model(case).parameters())
        bucket = (case.bucket_mb or DEFAULT_BUCKET_MB) * MB // 4
        self.buckets = torch.zeros(size, device=device).split(bucket)

    def prepare(self) -> None:
        """Nothing to reset: sums of zeros are zeros."""

    def step(self, mark: Mark) -> None:
        # All buckets start at once: none waits for gradients.
        for handle in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
            handle.wait()


class DataParallelOnLink(BesideHalves, DataParallelStep):
    """A training step, and its halves."""

    computation = Compute
    communication = Communication
