"""The contract of the training step, the check that a target meets it, and the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.model.mlp import MLPLanguageModel, MLPSize
from impl.precision import Precision
from impl.training_step.accounting import eager_peak
from shardmark.api import Family, Race, Refusable, RegistryError, add_family


class TrainingStep(Protocol):
    """`Step(model, optimizer, *, precision=Precision())`: forward, backward and update, separately or in one call.

    `model` maps tokens (batch, context) to logits (batch, context, vocab), and its trainable parameters have the
    precision's dtype; `optimizer` updates those parameters. Tokens and targets are int64 (batch, context), of another
    shape and of other strides in each call if the caller likes, as `ids[:, 1:]` is. The model may be any: a position's
    logits may depend on all of the batch, and it may draw random numbers. Those of its `blocks`, which a step may
    recompute, are drawn by torch's dropout modules.

    Must:

    - The loss is the mean cross entropy of all targets but -100, of the whole batch at once: a float32 scalar, as
      accurate as that given the logits, whatever their dtype and torch's default. Products are in the precision's
      compute dtype, backward's too, also where forward is called in another autocast of the caller's. Gradients are
      those of the loss's own random draws. A loss keeps its value, whatever is called after it.
    - Gradients accumulate unscaled in `.grad`, also in those that are there when the step is made, until the caller
      sets them to None; sparse ones too, or they are an error. Several losses may wait for their backward. Each
      `update` is one step of the optimizer, hooks of steps included, on the current `.grad`, finite or not, with its
      current options. The caller may write parameters while no loss waits, and gradients at any time (in float16 not
      between backward and update), in place or by `.data =` and `.grad =`.
    - Parameters may be frozen and unfrozen while no loss waits. No part of a step, nor a forward that raises, changes a
      module's mode, or a parameter's dtype or `requires_grad`, or draws random numbers but the model's, and backward
      leaves the state of the generators as it found it.
      Buffers that the model changes or replaces, as a batch norm's, change once in each forward; those of `blocks` may
      change again where backward recomputes them. Nothing is left of the activations once a loss is freed.
    - `copy.deepcopy(model)` stays independent of the model and its step. A step made anew on the same model and
      optimizer, if not a ValueError, is right where the first is no longer called; in float16 with a scale of its own.
    - A backward or an update may raise an error, as of a caller's hook: later calls are as if it had not been called,
      but for what it did to `.grad` and, after the optimizer's step, to parameters and the optimizer's state.
    - In float16 the loss is scaled, so that small gradients do not round to zero. Between backward and update `.grad`
      may be scaled too, and after it if the parameters themselves are float16. A step whose gradients overflow is
      skipped with a RuntimeWarning, leaves parameters and the optimizer's state unchanged, and the scale falls, also
      below 1, until gradients fit.

    Should: where all targets are ignored, the loss is NaN, as PyTorch's mean over nothing is, and gradients are zero;
    ValueError for a model, an optimizer and a precision that do not go together and, eager on CPU, for tokens and
    targets that the vocabulary does not have; hooks of parameters run, as those of data-parallel wrappers; the caller's
    autocast around all steps changes nothing; blocks that recompute under autocast leave no casts of their weights
    until backward ends; `mark` is called as each part ends.

    Options of some: `loss(model, tokens, targets)` is a scalar to train on in place of that mean; the step then passes
    its tokens and targets on as they are.
    """

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the targets: a float32 scalar.

        Once the loss is freed, no activations are left, with or without a backward.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to each parameter's `.grad`."""
        ...

    def update(self) -> None:
        """Take the optimizer's step."""
        ...

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Callable[[str], None] = ...) -> Tensor:
        """Run forward, backward and update. Returns the loss, detached.

        `mark` is called with "forward", "backward" and "optimizer" as each ends, or with "step" where they are one.
        Nothing is left of the activations.
        """
        ...


def _check(target: Any, device: str) -> None:
    """Check that the second step of a tiny model has a lower loss than its first."""
    model = MLPLanguageModel(MLPSize(dim=8, layers=1, vocab=5)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(4, device=device).reshape(1, 4)
    step = target(model, optimizer, precision=Precision())
    first = step(tokens, tokens + 1)
    if not isinstance(first, Tensor) or first.shape != ():
        raise RegistryError(f"it returned {type(first).__name__} and not the scalar loss")
    optimizer.zero_grad()
    if not step(tokens, tokens + 1) < first:
        raise RegistryError("its second step has no lower loss than its first")


def _float16(precision: Precision) -> str | None:
    return "float16" if torch.float16 in (precision.parameter, precision.compute) else None


FAMILY = add_family(
    Family(
        "training_step",
        TrainingStep,
        reference="eager",
        check=_check,
        may_refuse=(Refusable("float16", lambda *_, precision, **__: _float16(precision)),),
        memory=eager_peak,
        time=Race("eager", budget=1.25),  # a user's own step may use less memory than eager, but not much more time
    )
)
