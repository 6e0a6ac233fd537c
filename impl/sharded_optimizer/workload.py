"""A training step whose optimizer is sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from impl.training_step.cases import TrainingStepCase
from impl.training_step.rank_step import RankStep
from shardmark.api import Implementation, Mark, OwnModelCase, Unsupported, family, taken_apart, trains_own_model


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
        parameters, self.inner_class, defaults = taken_apart(self.made.optimizer, model.parameters())
        try:
            return model, implementation.adapted(parameters, self.inner_class, **defaults, **options)
        except ValueError as error:  # of one that does not update each element by itself, for example
            if not isinstance(case, OwnModelCase):
                raise
            raise Unsupported(str(error)) from None

    @property
    def synchronizes(self) -> Any:
        """The optimizer or the wrapper, whichever averages the gradients."""
        return self.optimizer if self.averages else self.model

    def clip(self, norm: float) -> None:
        """By the optimizer's own method if it has one. Unsupported if not, where a rank has a part of the average."""
        if hasattr(self.optimizer, "clip_grad_norm_"):
            self.optimizer.clip_grad_norm_(norm)
        elif self.averages:
            raise Unsupported("it averages gradients and has no method clip_grad_norm_")
        else:
            super().clip(norm)

    def prepare(self) -> None:
        """Compute gradients before the first step."""
        if self.loss is None:
            self.compute_gradients(lambda part: None)

    def step(self, mark: Mark) -> None:
        """The part "optimizer" is the update of this rank's own elements; what else `step` does communicates."""
        updates = [
            register_optimizer_step_pre_hook(_of(self.inner_class, lambda: mark("communication"))),
            register_optimizer_step_post_hook(_of(self.inner_class, lambda: mark("optimizer"))),
        ]
        self.update()
        for hook in updates:
            hook.remove()
        mark("communication")
        self._free_gradients()
        mark("optimizer")
        self.compute_gradients(mark)

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


def _of(inner: type[Optimizer], function: Callable[[], None]) -> Callable[..., None]:
    """A hook of all optimizers that calls the function for that class, which every implementation is given, and not for
    the sharded optimizer around it."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if type(optimizer) is inner:
            function()

    return hook


def _local_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer with this rank's state: `ZeroRedundancyOptimizer` holds it as `optim`."""
    return getattr(optimizer, "optim", optimizer)


trains_own_model("sharded_optimizer", ShardedStep, on_ranks=True, zero_stage=1)
