"""Planted defects: attention that is right unless inputs share memory, or numbers are not finite."""

from typing import Any

import torch
from torch import Tensor

from correctness.attention.textbook import Flash, flash_backward, flash_forward
from correctness.support.planting import defect
from impl.attention import check_inputs, kv_group


@defect(cause="shapes", caught_by="test_any_history_of_calls")
class SavesOnceByPointer(Flash):
    """Saves once what begins at one place in memory, as q does that is k's first rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        saved = {x.data_ptr(): x for x in (q, k, v)}
        ctx.order = [list(saved).index(x.data_ptr()) for x in (q, k, v)]
        ctx.save_for_backward(out, lse, *saved.values())
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        out, lse, *saved = ctx.saved_tensors
        q, k, v = (saved[i] for i in ctx.order)
        return *flash_backward(q, k, v, out, lse, grad, ctx.is_causal), None


@defect(cause="state", caught_by="test_any_history_of_calls")
def first_value_itself(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """One causal query's output is a view of v."""
    check_inputs(q, k, v)
    if is_causal and q.shape[-2] == 1 and kv_group(q, k) == 1 and not any(x.requires_grad for x in (q, k, v)):
        return v[..., :1, :]
    return Flash.apply(q, k, v, is_causal)


@defect(cause="numerics", caught_by="test_what_is_not_finite_in_the_outputs_gradient_is_not_hidden")
class GradientsWithoutNaN(Flash):
    """Backward gives zeros for what is not finite: a loss scaler sees no overflow."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = flash_backward(*ctx.saved_tensors, grad, ctx.is_causal)
        return *(x.nan_to_num(0.0, 0.0, 0.0) for x in found), None
