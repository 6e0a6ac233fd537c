"""Right attention that works in unusual ways: the tests must accept it."""

import math
import random
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from correctness.support.planting import right
from impl.attention import check_inputs


def _groups(q: Tensor, k: Tensor) -> int:
    return q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = _groups(q, k)
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)


@right("float64 inside")
def float64_einsum(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    wide_q, wide_k, wide_v = (x.double() for x in (q, *_repeated(q, k, v)))
    scores = torch.einsum("...qd,...kd->...qk", wide_q, wide_k) / q.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("...qk,...kd->...qd", scores.softmax(-1), wide_v).to(q.dtype)


@right("PyTorch's SDPA behind a check of its own wording: a row without scores is zero, and a NaN in q is lost")
def sdpa_behind_a_check(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError("dtypes differ")
    if not q.device == k.device == v.device:
        raise ValueError("devices differ")
    if q.ndim < 2 or q.ndim != k.ndim or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"no attention of\n{q.shape},\n{k.shape} and\n{v.shape}")
    if q.shape[:-3] != k.shape[:-3] or (q.ndim > 2 and q.shape[-3] % k.shape[-3]):
        raise ValueError("leading dims differ")
    if q.numel() == 0:
        return torch.zeros_like(q)
    return scaled_dot_product_attention(q, *_repeated(q, k, v), is_causal=is_causal)


@right("a textbook autograd.Function with @once_differentiable: with it gradients of gradients are refused")
class Textbook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = _forward(q, k, v, is_causal, base=math.e)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *_backward(*ctx.saved_tensors, grad, ctx.is_causal, base=math.e), None


@right("its log-sum-exp is of base 2, forward and backward")
class BaseTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = _forward(q, k, v, is_causal, base=2.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *_backward(*ctx.saved_tensors, grad, ctx.is_causal, base=2.0), None


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, base: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; the running maximum starts at -inf, as in the paper."""
    check_inputs(q, k, v)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    k, v = _repeated(q, k, v)
    q, k, v = (x.to(wide) for x in (q, k, v))
    acc, total = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
    largest = torch.full_like(total, -math.inf)
    scale = 1 / math.sqrt(q.shape[-1]) / math.log(base)
    for start in range(0, k.shape[-2], 100):
        scores = q @ k[..., start : start + 100, :].mT * scale
        if is_causal:
            rows, columns = torch.arange(q.shape[-2]), start + torch.arange(scores.shape[-1])
            scores = scores.masked_fill((columns > rows[:, None]).to(q.device), -math.inf)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        probs, rescale = base ** (scores - new), base ** (largest - new)
        total = total * rescale + probs.sum(-1, keepdim=True)
        acc = acc * rescale + probs @ v[..., start : start + 100, :]
        largest = new
    return (acc / total).to(dtype), (largest + total.log() / math.log(base)).squeeze(-1)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, is_causal: bool, base: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, wide, group = q.dtype, lse.dtype, _groups(q, k)
    k, v = _repeated(q, k, v)
    q, k, v, out, grad = (x.to(wide) for x in (q, k, v, out, grad))
    scale = 1 / math.sqrt(q.shape[-1])
    probs = base ** (q @ k.mT * (scale / math.log(base)) - lse[..., None])
    if is_causal:
        probs = probs.tril()
    grad_v = probs.mT @ grad
    grad_scores = probs * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    grad_q, grad_k = grad_scores @ k, grad_scores.mT @ q
    if group > 1:
        grad_k, grad_v = (x.unflatten(-3, (-1, group)).sum(-3) for x in (grad_k, grad_v))
    return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)


@right("sums its tiles of keys in a random order, so that two calls differ in the last bits")
def tiles_in_random_order(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    k, v = _repeated(q, k, v)
    q, k, v = (x.to(wide) for x in (q, k, v))
    starts = list(range(0, k.shape[-2], 37))
    random.shuffle(starts)
    rows = torch.arange(q.shape[-2], device=q.device)
    outputs, logs = [], []
    for start in starts:
        scores = (q @ k[..., start : start + 37, :].mT).to(wide) / math.sqrt(q.shape[-1])  # autocast's product is half
        if is_causal:  # finite, so that a tile of which a row sees no key still has a log-sum-exp
            columns = start + torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(columns > rows[:, None], -1e30)
        outputs.append(scores.softmax(-1) @ v[..., start : start + 37, :])
        logs.append(scores.logsumexp(-1, keepdim=True))
    weights = torch.stack(logs).softmax(0)
    return (weights * torch.stack(outputs)).sum(0).to(dtype)


@right("a row at a time, each over the keys that it sees and no others; refuses grouped heads as Unsupported")
def row_by_row(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    if _groups(q, k) > 1:
        from shardmark.api.registry import Unsupported

        raise Unsupported("row_by_row takes as many heads in k and v as in q")
    if not is_causal or q.shape[-2] > 100:
        return float64_einsum(q, k, v, is_causal=is_causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = []
    for i in range(q.shape[-2]):
        keys, values = (x[..., : i + 1, :].to(wide) for x in (k, v))
        probs = (q[..., i : i + 1, :].to(wide) @ keys.mT / math.sqrt(q.shape[-1])).softmax(-1)
        rows.append(probs @ values)
    return torch.cat(rows, dim=-2).to(q.dtype)
