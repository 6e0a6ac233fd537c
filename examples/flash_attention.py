"""FlashAttention-2 in plain PyTorch: scores tile by tile, and one log-sum-exp a query for backward (Dao, 2023).

pytest correctness --impl attention=examples/flash_attention.py:FlashAttention
"""

import torch
from torch.autograd.function import once_differentiable

TILE = 128


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal)`: q (..., queries, dim), k and v (..., keys, dim)."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        check(q, k, v)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=precise(q), device=q.device)  # log-sum-exp of each query's scores
        for rows in tiles(q):
            biggest = torch.full_like(lse[..., rows], float("-inf")).unsqueeze(-1)
            total, summed = torch.zeros_like(biggest), torch.zeros_like(q[..., rows, :], dtype=lse.dtype)
            for columns in tiles(k, before=rows.stop if is_causal else None):
                scores = scores_of(q, k, rows, columns, is_causal)  # (..., rows, columns)
                before, biggest = biggest, torch.maximum(biggest, scores.amax(-1, keepdim=True))
                weights = scores.sub_(biggest).exp_()
                rescale = (before - biggest).exp()  # what was summed so far was relative to the maximum before
                total = total * rescale + weights.sum(-1, keepdim=True)
                summed = summed * rescale + weights @ tile(v, columns, q)
            out[..., rows, :] = summed / total
            lse[..., rows] = (biggest + total.log()).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows in tiles(q):
            q_tile, grad_tile = (x[..., rows, :].to(lse.dtype) for x in (q, grad_out))
            delta = (grad_tile * out[..., rows, :]).sum(-1, keepdim=True)
            for columns in tiles(k, before=rows.stop if ctx.is_causal else None):
                weights = scores_of(q, k, rows, columns, ctx.is_causal).sub_(lse[..., rows, None]).exp_()
                grad_scores = (grad_tile @ tile(v, columns, q).mT).sub_(delta).mul_(weights).mul_(q.shape[-1] ** -0.5)
                grad_q[..., rows, :] += grad_scores @ tile(k, columns, q)
                grad_k[..., columns, :] += per_key_head(grad_scores.mT @ q_tile, k)
                grad_v[..., columns, :] += per_key_head(weights.mT @ grad_tile, v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def check(q, k, v):
    """ValueError for what does not go together. Several query heads may share a head of k and v."""
    heads = q.dim() == k.dim() > 2 and q.shape[:-3] == k.shape[:-3] and k.shape[-3] and q.shape[-3] % k.shape[-3] == 0
    go = q.dim() > 1 and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    if not go or not (q.shape[:-2] == k.shape[:-2] or heads):
        raise ValueError(f"shapes do not go together: q {(*q.shape,)}, k {(*k.shape,)}, v {(*v.shape,)}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or not q.is_floating_point():
        raise ValueError("q, k and v are of one floating dtype and on one device")
    if k.shape[-2] == 0:
        raise ValueError("attention over no keys")


def precise(x):
    """The dtype to compute in: of half precision, float32."""
    return torch.promote_types(x.dtype, torch.float32)


def tiles(x, before=None):
    """Slices of at most TILE rows of x, of those that come `before` a row."""
    end = x.shape[-2] if before is None else min(before, x.shape[-2])
    return [slice(start, min(start + TILE, x.shape[-2])) for start in range(0, end, TILE)]


def tile(x, columns, q):
    """Rows of k or v, once for each query head."""
    x = x[..., columns, :].to(precise(x))
    return x if q.shape[:-2] == x.shape[:-2] else x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def per_key_head(grad, k):
    """The sum over the query heads that share a head of k."""
    return grad if grad.shape[:-2] == k.shape[:-2] else grad.unflatten(-3, (k.shape[-3], -1)).sum(-3)


def scores_of(q, k, rows, columns, is_causal):
    scores = q[..., rows, :].to(precise(q)) @ tile(k, columns, q).mT
    scores.mul_(q.shape[-1] ** -0.5)
    if is_causal and columns.stop > rows.start + 1:  # some of these keys come after some of these queries
        query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(columns.start, columns.stop, device=q.device) > query, float("-inf"))
    return scores
