"""The eager training step, operator by operator: the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from impl.precision import FLOAT32, Precision
from impl.training_step.accounting import eager_peak
from shardmark.api import register

Loss = Callable[[Any, Any, Any], Tensor]


def next_token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy in float32; ValueError, on CPU, for targets that the vocabulary does not have."""
    logits = model(tokens).flatten(0, 1).float()  # (tokens, vocab); half-precision logits are freed here
    try:
        return cross_entropy(logits, targets.flatten())
    except IndexError:
        raise ValueError(
            f"targets go from 0 to {logits.shape[-1] - 1}, or are -100 to be ignored, got another"
        ) from None


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Backward's products have forward's dtypes, whatever the caller's autocast.

    Where there is none, none is entered: inside of any autocast, even a disabled one, blocks that recompute their
    forward under their own leave the weights that they cast in PyTorch's cache until the outermost ends.
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class EagerStep:
    """Contract and errors: `impl.training_step.TrainingStep`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        precision: Precision = FLOAT32,
        loss: Loss = next_token_loss,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self._loss = loss
        for p in model.parameters():
            if p.requires_grad and p.dtype != precision.parameter:
                raise ValueError(f"the model's parameters are {p.dtype}, and the precision's {precision.parameter}")
        if precision.master is not None and not getattr(optimizer, "master_weights", False):
            raise ValueError(
                f"master weights are the optimizer's to keep, and {type(optimizer).__name__} keeps none: impl.optim's "
                "optimizers do with master_weights=True"
            )
        if precision.parameter == torch.float16 and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"float16 parameters need an optimizer that unscales their gradients itself, as FusedAdamW does; "
                f"{type(optimizer).__name__} does not"
            )
        self.device = next(model.parameters()).device.type
        self.scaler = precision.scaler(self.device)
        self._scaled = False
        """True if `.grad` holds scaled gradients: a backward ran since the last update."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        torch.clear_autocast_cache()  # inside the caller's autocast it outlives updates of the weights that were cast
        return self._forward(tokens, targets)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            return self._loss(self.model, tokens, targets)

    def backward(self, loss: Tensor) -> None:
        if self.scaler.is_enabled() and not self._scaled:
            if left := self._gradients():  # gradients from before the last update, which are unscaled
                torch._foreach_mul_(left, self.scaler.get_scale())
            self._scaled = True
        with _without_autocast(self.device):
            self.scaler.scale(loss).backward()

    def update(self) -> None:
        """Take the optimizer's step, or skip it if float16 gradients overflowed."""
        scaled, self._scaled = self._scaled and bool(self._gradients()), False
        if not scaled:
            self.optimizer.step()
            return
        scale = self.scaler.get_scale()
        if self.precision.parameter != torch.float16:
            with suppress(RuntimeError):  # the caller may have unscaled them, for example to clip them
                self.scaler.unscale_(self.optimizer)  # an optimizer that unscales them itself may leave `.grad` scaled
        try:
            self.scaler.step(self.optimizer)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # which the scaler gives an optimizer that unscales by itself
                self.optimizer.__dict__.pop(name, None)
            raise
        finally:  # an error of the optimizer's leaves the scaler ready for the next step
            self.scaler.update()
        if self.scaler.get_scale() < scale:
            warnings.warn(
                f"float16 gradients overflowed: the step is skipped, the loss is scaled by {self.scaler.get_scale():g} "
                f"from here on, where it was {scale:g}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer reads."""
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Callable[[str], None] = lambda part: None) -> Tensor:
        loss = self.forward(tokens, targets)
        mark("forward")
        self.backward(loss)
        loss = loss.detach()
        mark("backward")
        self.update()
        mark("optimizer")
        return loss


register("training_step", "eager", EagerStep, memory=eager_peak, predicted=True, called="the eager step")
