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

    `model` maps tokens (batch, context) to logits (batch, context, vocab), and its parameters have the precision's
    dtype; `optimizer` updates those parameters. Tokens and targets are int64 (batch, context), of another shape in each
    call if the caller likes. Products are in the precision's compute dtype, backward's too; the loss is float32, and as
    accurate as that given the logits, whatever their dtype. `model` may be any: a position's logits may depend on all
    of the batch, so it gets tokens as they are, all at once; and where it draws random numbers, as dropout does,
    gradients are those of the same draws as the loss.

    Gradients accumulate unscaled in `.grad` until the caller sets them to None (float16: see below). Several losses
    may wait for their backward, also across an update that is skipped. While none waits, parameters may be frozen
    and unfrozen, also those frozen when the step was made. Each `update` is one step of the optimizer on the
    current `.grad`, with its current options. No part of a step changes the mode of a module, or the dtype or
    `requires_grad` of a parameter.

    Targets of -100 are ignored, and do not count in the mean. If all are ignored, the loss is NaN, as PyTorch's
    mean over nothing is, and the gradients are zero: weight decay and momentum still move parameters.

    In float16 the loss is scaled, so that small gradients do not round to zero. Between backward and update `.grad`
    may be scaled too. After an update it is unscaled, unless the parameters themselves are float16: then the caller
    sets it to None before the next backward. A step whose gradients overflow is skipped with a RuntimeWarning, and
    the loss scale is reduced, also below 1, until gradients fit. A skipped step leaves parameters and the
    optimizer's state unchanged.

    If an implementation has the option, `loss(model, tokens, targets)` is a scalar to train on in place of that
    mean; the step then passes its tokens and targets on as they are.

    ValueError for a model, an optimizer and a precision that do not go together, and, eager on CPU, for tokens and
    targets that the vocabulary does not have; compiled code and CUDA raise assertions of their own.
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
