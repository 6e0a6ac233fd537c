"""What does sharding the optimizer save, and cost: memory by kind, step time, bytes communicated?

A step here begins with the optimizer, on the gradients of the backward before it, and ends with its own gradients
averaged: so the exchange of parameters has a forward to hide behind, and nothing is under way when the clock stops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.accounting.sharded_optimizer import work, zero_redundancy_work
from perf.ranks import RankStep, language_model
from shardmark import cases
from shardmark.cases import ShardedStepCase, TrainingStepCase
from shardmark.measure import Measure
from shardmark.plan import Mark
from shardmark.registry import Implementation, family
from shardmark.world import World

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


@pytest.mark.family("sharded_optimizer")
@pytest.mark.question("What does sharding the optimizer save, and cost?")
@pytest.mark.cases(cases.SHARDED_OPTIMIZER)
@pytest.mark.benchmark(min_rounds=9)
def test_sharded_optimizer(
    implementation: Implementation, case: ShardedStepCase, world: World, measure: Measure
) -> None:
    case = replace(case, ranks=world.size)
    theory = zero_redundancy_work if implementation.name == "zero_redundancy" else work
    measure(ShardedStep, implementation, case, world_size=world.size, work=theory(case), slack=1.02)
