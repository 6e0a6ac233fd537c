"""Backward passes in two parts: the gradient of a stage's input now, those of its linear layers' weights later.

    prepare(stage)
    with deferring(later):
        out = stage(x)
    with deferring(later):
        out.backward(gradient)  # x.grad, and the gradients of all other parameters
    later.find()                # weight.grad

A weight's gradient takes the layer's input and the gradient of its output, which are kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Later:
    """Products that give gradients of weights, in the order in which backward has met them."""

    current: Later | None = None
    """The one of the innermost `deferring` block. Autograd's threads, in which passes are recomputed, see it too."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []
        """Weight, input of the layer (..., in), and gradient of its output (..., out)."""

    def find(self) -> None:
        """Add the gradients to the weights' own, through autograd, so that hooks on them run."""
        while self.products:  # one after the other, so that one alone is in memory
            weight, x, gradient = self.products.pop()
            rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            torch.autograd.backward(Given.apply(weight, rows[0].t() @ rows[1]))


@contextmanager
def deferring(later: Later | None) -> Iterator[None]:
    """In the block layers that are prepared leave their weights' gradients for later: in forward, and in backward where
    a pass is recomputed. None: they do not."""
    before, Later.current = Later.current, later
    try:
        yield
    finally:
        Later.current = before


def prepare(module: nn.Module) -> None:
    """Prepare the module's linear layers for `deferring`, but those with a forward pass of their own."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    later, weight = Later.current, layer.weight
    if later is None or not (torch.is_grad_enabled() and weight.requires_grad) or _is_autocast(x):
        return linear(x, weight, layer.bias)
    out: Tensor = _Product.apply(x, weight, layer.bias, later)
    return out


def _is_autocast(x: Tensor) -> bool:
    """Autocast's products are in another dtype than the weight, whose gradient is found with the input's."""
    return torch.is_autocast_enabled(x.device.type)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # checkpointing would give a copy back, which has no gradient
        ctx.later = later
        return linear(x, weight, bias)  # the bias added later would be rounded once more

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        ctx.later.products.append((ctx.weight, x.detach(), gradient))
        of_input = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None


class Given(torch.autograd.Function):
    """A number whose gradient with respect to the weight is the given one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None
