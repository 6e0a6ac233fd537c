"""A backward pass whose gradients cannot be differentiated again, and raise an error if someone tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FirstDerivative(torch.autograd.Function):
    """`FirstDerivative.apply(compute, *tensors)` is `compute(*tensors)`; differentiating it raises RuntimeError.

    PyTorch's `once_differentiable` is not enough: unless the output's gradient itself requires grad, it treats the
    gradients as constants, so a loss term made of them (a gradient penalty) would silently have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Tensor) -> Any:
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("FlashAttention has no double backward: its gradients cannot be differentiated; eager's can")
