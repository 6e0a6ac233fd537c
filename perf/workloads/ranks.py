"""One training step of the language model on every rank of a world, which all questions about ranks measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.training_step.cases import TrainingStepCase
from shardmark.clock import Laps
from shardmark.memory import Memory
from shardmark.plan import IMPLEMENTATION, Mark, Measured
from shardmark.registry import Implementation


class RankStep(ABC):
    """One AdamW step on this rank's own batch. Subclasses build the model and the optimizer."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = dist.get_backend()
        with torch.device(device):
            self.model, self.optimizer = self.build(implementation, case)
            vocab = (MLP_SIZES if case.model in MLP_SIZES else SIZES)[case.model].vocab
            self.tokens, self.targets = (torch.randint(vocab, (case.batch, case.context)) for _ in range(2))
        self.loss: Tensor | None = None

    @abstractmethod
    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The model and the optimizer, wrapped or sharded by the implementation. The default device is set already."""

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
        logits = self.model(self.tokens)  # (batch, context, vocab)
        self.loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        del logits  # autograd saves what backward needs
        mark("forward")
        self.loss.backward()
        mark("backward")


def language_model(case: TrainingStepCase) -> Transformer | MLPLanguageModel:
    """A new model of the case's size, on the default device."""
    if case.model in MLP_SIZES:
        return MLPLanguageModel(MLP_SIZES[case.model])
    return Transformer(SIZES[case.model], context_length=case.context)


def measured_once(memory: Memory, laps: list[Laps]) -> Measured:
    """What a rank reports of something that it does once: the bytes after each stage and at the peak, and the times."""
    reported = Memory(peak=memory.peak, tensors=memory.tensors, workspace=memory.workspace, stages=memory.stages)
    return Measured(dist.get_backend(), reported, {IMPLEMENTATION: laps})
