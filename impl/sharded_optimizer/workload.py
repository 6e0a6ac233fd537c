"""A training step whose optimizer is sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from impl.training_step.cases import TrainingStepCase
from impl.training_step.rank_step import RankStep
from shardmark.api import Implementation, Mark, family, trains_own_model


class ShardedStep(RankStep):
    """A copy of the model on every rank, and the optimizer sharded over them.

    A step begins with the optimizer and ends with the gradients, so that the all-gather of updated parameters overlaps
    forward within one step.
    """

    def build(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """Make optimizer and model; wrap the model if the optimizer does not average gradients itself."""
        self.averages = implementation.accepts("average_gradients")
        model: Any = self.made.module
        options: dict[str, Any] = {"average_gradients": True, "module": model} if self.averages else {}
        if case.bucket_mb is not None and implementation.accepts("bucket_mb"):
            options["bucket_mb"] = case.bucket_mb
        if not self.averages:
            model = family("data_parallel").implementations[implementation.facts.wrapper].adapted(model)
        return model, implementation.adapted(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, **options)

    @property
    def synchronizes(self) -> Any:
        """The optimizer or the wrapper, whichever averages the gradients."""
        return self.optimizer if self.averages else self.model

    def synchronize(self) -> None:
        self.synchronizes.finish_gradient_synchronization()

    def prepare(self) -> None:
        """Compute gradients before the first step."""
        if self.loss is None:
            self.forward_and_backward(lambda part: None)
            self.synchronize()

    def step(self, mark: Mark) -> None:
        """The part "optimizer" is AdamW's update of this rank's own elements; what else `step` does communicates."""
        updates = [
            register_optimizer_step_pre_hook(_of_adamw(lambda: mark("communication"))),
            register_optimizer_step_post_hook(_of_adamw(lambda: mark("optimizer"))),
        ]
        self.optimizer.step()
        for hook in updates:
            hook.remove()
        mark("communication")
        self._free_gradients()
        mark("optimizer")
        self.forward_and_backward(mark)
        self.synchronize()
        mark("communication")

    def compute_step(self, mark: Mark) -> None:
        """Forward and backward without communication. Gradients are freed, so that the ranks' parameters stay equal."""
        self._free_gradients()
        with self.synchronizes.no_sync():
            self.forward_and_backward(mark)
        self._free_gradients()

    def kinds(self) -> dict[str, list[Tensor]]:
        """The live tensors by kind."""
        parameters = list(self.model.parameters())
        state = [value for entry in _local_optimizer(self.optimizer).state.values() for value in entry.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": [value for value in state if isinstance(value, Tensor)],
        }

    def _free_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.loss = None


def _of_adamw(function: Callable[[], None]) -> Callable[..., None]:
    """A hook of all optimizers that calls the function for AdamW, which every implementation is given, and not for the
    sharded optimizer around it."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.AdamW:
            function()

    return hook


def _local_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer with this rank's state: `ZeroRedundancyOptimizer` holds it as `optim`."""
    return getattr(optimizer, "optim", optimizer)


trains_own_model("sharded_optimizer", ShardedStep, on_ranks=True, zero_stage=1)
