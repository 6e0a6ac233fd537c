"""A backward pass that is not to be differentiated again, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FirstDerivative(torch.autograd.Function):
    """`FirstDerivative.apply(compute, *tensors)` is `compute(*tensors)`; differentiating it is a RuntimeError.

    PyTorch's `once_differentiable` is not enough: unless the output's gradient itself requires grad, it lets the
    gradients pass for constants, and a penalty on them is silently left out.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Tensor) -> Any:
        """What the backward pass computes."""
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Not there."""
        raise RuntimeError("FlashAttention has no double backward: its gradients cannot be differentiated; eager's can")
