"""Right attention that works in unusual ways: the tests must accept it."""

import math
import random
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from correctness.attention.textbook import Flash, checked, flash_backward
from correctness.support.planting import right
from impl.attention import check_inputs, kv_group, per_query_head


@right("float64 inside")
def float64_einsum(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    wide_q, wide_k, wide_v = (x.double() for x in checked(q, k, v))
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
    k, v = (per_query_head(x, kv_group(q, k)) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@right("a textbook autograd.Function with @once_differentiable: with it gradients of gradients are refused")
class Textbook(Flash): ...


@right("keys in tiles with a running maximum, which starts at -inf as in the paper; its log-sum-exp is of base 2")
class BaseTwo(Flash):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = _tiled(*checked(q, k, v), is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *saved, lse = ctx.saved_tensors
        return *flash_backward(*saved, lse * math.log(2), grad, ctx.is_causal), None


def _tiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of base 2."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    acc, total = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
    largest = torch.full_like(total, -math.inf)
    for start in range(0, k.shape[-2], 100):
        scores = q @ k[..., start : start + 100, :].mT / math.sqrt(q.shape[-1]) / math.log(2)
        if is_causal:
            rows, columns = torch.arange(q.shape[-2]), start + torch.arange(scores.shape[-1])
            scores = scores.masked_fill((columns > rows[:, None]).to(q.device), -math.inf)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        probs, rescale = (scores - new).exp2(), (largest - new).exp2()
        total = total * rescale + probs.sum(-1, keepdim=True)
        acc = acc * rescale + probs @ v[..., start : start + 100, :]
        largest = new
    return (acc / total).to(dtype), (largest + total.log2()).squeeze(-1)


@right("sums its tiles of keys in a random order, so that two calls differ in the last bits")
class TilesInRandomOrder(Flash):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = _in_random_order(*checked(q, k, v), is_causal)
        ctx.save_for_backward(q, k, v, out, lse)  # no tile: a checkpoint's second forward draws another order
        ctx.is_causal = is_causal
        return out


def _in_random_order(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    starts = list(range(0, k.shape[-2], 37))
    random.shuffle(starts)
    rows = torch.arange(q.shape[-2], device=q.device)
    outputs, sums = [], []
    for start in starts:
        scores = (q @ k[..., start : start + 37, :].mT).to(wide) / math.sqrt(q.shape[-1])  # autocast's product is half
        if is_causal:  # finite, so that a tile of which a row sees no key still has a log-sum-exp
            columns = start + torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(columns > rows[:, None], -1e30)
        outputs.append(scores.softmax(-1) @ v[..., start : start + 37, :])
        sums.append(scores.logsumexp(-1))
    logs = torch.stack(sums)
    return (logs.softmax(0)[..., None] * torch.stack(outputs)).sum(0).to(dtype), logs.logsumexp(0)


@right("a row at a time, each over the keys that it sees and no others; refuses grouped heads as Unsupported")
def row_by_row(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    if kv_group(q, k) > 1:
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
