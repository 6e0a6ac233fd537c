"""Textbook attention, step by step; each planted defect changes one step."""

import math
from typing import Any

import torch
from torch import Tensor

from impl.attention import check_inputs, kv_group, per_query_head


def scores_of(q: Tensor, k: Tensor, is_causal: bool = False) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(future(q, k), -math.inf) if is_causal else scores


def future(q: Tensor, k: Tensor, first: int = 1) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(first)


def checked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_inputs(q, k, v)
    return q, per_query_head(k, kv_group(q, k)), per_query_head(v, kv_group(q, k))


def summed_over_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of each group of query heads: (..., q_heads, seq, dim) to the shape of `like`."""
    group = 1 if grad.ndim < 3 else grad.shape[-3] // like.shape[-3]
    return grad if group == 1 else grad.unflatten(-3, (-1, group)).sum(-3)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output (..., q_len, dim) and log-sum-exp (..., q_len)."""
    q, k, v = checked(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scores_of(q.to(wide), k.to(wide), is_causal).to(wide)  # autocast's product is half
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype), lse


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, shapes = q.dtype, (k, v)
    q, k, v = checked(q, k, v)
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, out, grad = (x.to(wide) for x in (q, k, v, out, grad))
    probs = (scores_of(q, k, is_causal) - lse.to(wide)[..., None]).exp()
    grad_scores = probs * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    grad_k, grad_v = (
        summed_over_groups(x, like) for x, like in zip((grad_scores.mT @ q, probs.mT @ grad), shapes, strict=True)
    )
    return (grad_scores @ k).to(dtype), grad_k.to(dtype), grad_v.to(dtype)


class Flash(torch.autograd.Function):
    """Correct attention; a second derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, ctx.is_causal), None
