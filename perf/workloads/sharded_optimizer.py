"""A training step whose optimizer is sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.training_step.cases import TrainingStepCase
from perf.workloads.ranks import RankStep, language_model
from shardmark.plan import Mark
from shardmark.registry import Implementation, family

WRAPPERS = {"zero_redundancy": "ddp"}
"""Who averages the gradients of an optimizer that does not do it itself; `bucketed` of all others."""


class ShardedStep(RankStep):
    """The whole model on every rank, and the optimizer spread over them."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """An optimizer that averages gradients itself and the model alone, or one with the model in its wrapper."""
        self.averages = implementation.accepts("average_gradients")
        model: Any = language_model(case)
        options: dict[str, Any] = {"average_gradients": True, "module": model} if self.averages else {}
        if not self.averages:
            wrapper = WRAPPERS.get(implementation.name, "bucketed")
            model = family("data_parallel").implementations[wrapper].adapted(model)
        return model, implementation.adapted(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, **options)

    @property
    def synchronizes(self) -> Any:
        """What averages the gradients."""
        return self.optimizer if self.averages else self.model

    def synchronize(self) -> None:
        """What is left of the gradients' communication after backward."""
        self.synchronizes.finish_gradient_synchronization()

    def prepare(self) -> None:
        """Gradients for the step to begin with, where the last one has not left them."""
        if self.loss is None:
            self.forward_and_backward(lambda part: None)
            self.synchronize()

    def step(self, mark: Mark) -> None:
        """Optimizer, forward, backward, what is left of communication."""
        self.optimizer.step()
        self._let_go()
        mark("optimizer")
        self.forward_and_backward(mark)
        self.synchronize()
        mark("communication")

    def compute_step(self, mark: Mark) -> None:
        """Forward and backward without communication. The gradients are thrown away, so that the ranks stay alike."""
        self._let_go()
        with self.synchronizes.no_sync():
            self.forward_and_backward(mark)
        self._let_go()

    def kinds(self) -> dict[str, list[Tensor]]:
        """The live tensors by kind."""
        parameters = list(self.model.parameters())
        state = [value for entry in _own(self.optimizer).state.values() for value in entry.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": [value for value in state if isinstance(value, Tensor)],
        }

    def _let_go(self) -> None:
        self.optimizer.zero_grad()
        self.loss = None


def _own(optimizer: Any) -> Optimizer:
    """The optimizer that has this rank's state: torch's is inside of `ZeroRedundancyOptimizer`."""
    return getattr(optimizer, "optim", optimizer)
