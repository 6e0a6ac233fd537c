"""A sharded training step beside its computation alone: the rest of the step is exposed communication."""

from __future__ import annotations

from impl.data_parallel.link_workload import Compute
from impl.fsdp.workload import FSDPStep
from impl.training_step.cases import TrainingStepCase
from shardmark.api import Implementation, Mark


class FSDPOnLink(FSDPStep):
    """A training step, and in the same rounds forward and backward of the model without sharding, which both fit."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        super().__init__(implementation, case, device)
        self.alone = implementation, case, device
        self.unsharded: Compute | None = None

    def compute_step(self, mark: Mark) -> None:
        """Forward and backward of a model of its own, made in the first call, when no meter runs."""
        self.unsharded = self.unsharded or Compute(*self.alone)
        self.unsharded.prepare()
        self.unsharded.forward_and_backward(mark)
