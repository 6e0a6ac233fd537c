"""One training step of a model on every rank of a world, which all questions about ranks measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.training_step.cases import TrainingStepCase
from impl.training_step.micro_batches import accumulate
from impl.training_step.models import made
from shardmark.api import PLAIN, Implementation, Made, Mark


class RankStep(ABC):
    """One training step on this rank's own batch. Subclasses wrap the model and build the optimizer."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        self.recipe = getattr(case, "recipe", PLAIN)
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

    @property
    def synchronizes(self) -> Any:
        """The wrapper, or the optimizer, that averages gradients."""
        return self.model

    def clip(self, norm: float) -> None:
        """Scale the averaged gradients so that their norm is at most `norm`."""
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def prepare(self) -> None:
        """Free the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        self.compute_gradients(mark)
        self.update()
        mark("optimizer")

    def compute_gradients(self, mark: Mark) -> None:
        """Averaged gradients of the mean loss of all micro-batches."""
        accumulate(partial(self.forward_and_backward, mark), self.recipe.micro_batches, self.synchronizes)
        self.synchronizes.finish_gradient_synchronization()
        mark("communication")

    def update(self) -> None:
        """Clip gradients if the recipe says so, and take the optimizer's step."""
        if self.recipe.clip is not None:
            self.clip(self.recipe.clip)
        self.optimizer.step()

    def forward_and_backward(self, mark: Mark) -> None:
        """Both passes over one micro-batch."""
        self.loss = None
        self.loss = self.made.loss(self.model, *self.made.batch)
        if self.recipe.micro_batches > 1:
            self.loss = self.loss / self.recipe.micro_batches
        mark("forward")
        self.loss.backward()
        mark("backward")
