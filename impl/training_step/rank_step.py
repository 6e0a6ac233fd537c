"""One training step of a model on every rank of a world, which all questions about ranks measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from impl.training_step.cases import TrainingStepCase
from impl.training_step.models import made
from shardmark.api import Implementation, Made, Mark


class RankStep(ABC):
    """One AdamW step on this rank's own batch. Subclasses wrap the model and build the optimizer."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        with torch.device(device):
            self.made = self.make(case)
            self.model, self.optimizer = self.build(implementation, case)
        self.loss: Tensor | None = None

    def make(self, case: Any) -> Made:
        """A new model, batch and loss on the default device, which is this rank's."""
        return made(case)

    @abstractmethod
    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """`self.made`'s module and the optimizer, wrapped or sharded by the implementation."""

    def synchronize(self) -> None:
        """Finish the communication of gradients that backward started."""
        self.model.finish_gradient_synchronization()

    def prepare(self) -> None:
        """Free the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        self.forward_and_backward(mark)
        self.synchronize()
        mark("communication")
        self.optimizer.step()
        mark("optimizer")

    def forward_and_backward(self, mark: Mark) -> None:
        self.loss = self.made.loss(self.model, *self.made.batch)
        mark("forward")
        self.loss.backward()
        mark("backward")
