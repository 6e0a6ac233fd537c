"""Planted defects: layers that hide what is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from correctness.layers.textbook import Gated, Norm, Textbook, gated_gradients, norm_gradients
from correctness.support.planting import defect


class _NormWithoutNaN(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *(x.nan_to_num(0.0, 0.0, 0.0) for x in norm_gradients(*ctx.saved_tensors, grad)), None


class _GateWithoutNaN(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return tuple(x.nan_to_num(0.0, 0.0, 0.0) for x in gated_gradients(*ctx.saved_tensors, grad))


@defect(cause="numerics", caught_by="test_what_is_not_finite_in_a_results_gradient_is_not_hidden")
class GradientsWithoutNaN(Textbook):
    """Backward gives zeros for what is not finite: a loss scaler sees no overflow."""

    norm = _NormWithoutNaN
    gate = _GateWithoutNaN
