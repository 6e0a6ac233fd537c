"""A backward pass whose gradients cannot be differentiated again, and raise an error if someone tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FirstDerivative(torch.autograd.Function):
    """`FirstDerivative.apply(name, compute, *tensors)` is `compute(*tensors)`; differentiating it raises RuntimeError.

    `name` is what has no double backward, for the error. PyTorch's `once_differentiable` is not enough: unless the
    output's gradient itself requires grad, it treats the gradients as constants, so a loss term made of them (a
    gradient penalty) would silently have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, name: str, compute: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.name = name
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{ctx.name} has no double backward: its gradients cannot be differentiated; eager's can")
