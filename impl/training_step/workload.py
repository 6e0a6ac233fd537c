"""One training step of a model on one device, and the variants that questions about it measure."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from impl.precision import PRECISIONS, Precision
from impl.training_step.cases import TrainingStepCase
from impl.training_step.models import checkpointed, made, next_token_loss
from shardmark.api import PLAIN, Implementation, Loss, Mark, OwnModelCase, Unsupported, resolve, trains_own_model


class LanguageModelStep:
    """One training step, or the part of it that the case names, of a language model on random tokens, or of a user's
    own model with its own batch and loss."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = implementation.name
        self.case = case
        with torch.device(device):
            self.made = made(case)
        self.recipe = getattr(case, "recipe", PLAIN)
        if self.recipe.micro_batches > 1 and not getattr(implementation.target, "accumulates", True):
            raise Unsupported(f"{implementation} takes one batch a step: forward and update are in one call")
        self.options: dict[str, Any] = {"precision": _precision(case)}
        self.batch = self.made.batch
        if isinstance(case, OwnModelCase):
            self.options["loss"] = partial(_of_batch, self.made.loss, self.recipe.micro_batches)
            self.batch = self.made.batch, None
        elif case.autocast_loss:
            self.options["loss"] = next_token_loss
        if "loss" in self.options and not implementation.accepts("loss"):
            raise Unsupported("its signature has no option 'loss'")
        self.model = self.made.module
        if not isinstance(case, OwnModelCase):  # a user's own model keeps its dtypes, which may be several
            self.model.to(self.options["precision"].parameter)
        self.optimizer = self.made.optimizer(list(self.model.parameters()))
        if self.recipe.clip is not None:
            self.optimizer.register_step_pre_hook(self._clip)
        try:
            self.training_step = implementation.adapted(self.model, self.optimizer, **self.options)
        except ValueError as error:  # no `model.blocks` to checkpoint, for example
            if not isinstance(case, OwnModelCase):
                raise
            raise Unsupported(str(error)) from None
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Free the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        if self.case.mode == "step":
            for _ in range(self.recipe.micro_batches - 1):
                loss = self.training_step.forward(*self.batch)
                mark("forward")
                self.training_step.backward(loss)
                del loss
                mark("backward")
            self.training_step(*self.batch, mark)
            return
        self.loss = self.training_step.forward(*self.batch)
        mark("forward")
        if self.case.mode == "forward_backward":
            self.training_step.backward(self.loss)
            mark("backward")

    def _clip(self, *_: Any) -> None:
        assert self.recipe.clip is not None
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)

    def kinds(self) -> dict[str, list[Tensor]]:
        """The live tensors by kind."""
        parameters: list[Tensor] = list(self.model.parameters())
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": [value for value in state if isinstance(value, Tensor)],
        }


def _precision(case: TrainingStepCase) -> Precision:
    """Return the case's precision; a user's own model computes in the dtype of its parameters."""
    if not isinstance(case, OwnModelCase):
        return PRECISIONS[case.dtype]
    dtype = getattr(torch, case.dtype)
    try:
        return Precision(dtype, dtype, dtype)
    except ValueError as error:
        raise Unsupported(str(error)) from None


def _of_batch(loss: Loss, micro_batches: int, model: nn.Module, batch: tuple[Any, ...], targets: None) -> Tensor:
    """The batch's share of the mean loss of all micro-batches."""
    return loss(model, *batch) if micro_batches == 1 else loss(model, *batch) / micro_batches


class CheckpointedStep(LanguageModelStep):
    """The eager step of a model under a checkpointing policy."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        super().__init__(resolve("training_step", "eager"), case, device)
        checkpointed(implementation, self.made, case)
        self.backend = implementation.name


trains_own_model("training_step", LanguageModelStep, on_ranks=False)
trains_own_model("checkpointing", CheckpointedStep, on_ranks=False, checkpoints=True)
