"""Planted defects: attention that saves too little precision, or keeps what it saves."""

from typing import Any

import torch
from torch import Tensor

from correctness.attention.textbook import Flash, flash_backward, flash_forward
from correctness.support.planting import defect


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
class LogSumExpInBfloat16(Flash):
    """Saves the log-sum-exp in the inputs' half precision."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse.to(q.dtype) if q.itemsize == 2 else lse)
        ctx.is_causal = is_causal
        return out


@defect(cause="memory", caught_by="test_what_a_call_saves_is_freed_without_the_collector")
class SavedInACycle(Flash):
    """Its node refers to itself: what it saved stays until the garbage collector runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.kept, ctx.is_causal, ctx.self = (q, k, v, out, lse), is_causal, ctx
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.kept, grad, ctx.is_causal), None
