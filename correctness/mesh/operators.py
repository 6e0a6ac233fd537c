"""Differentiable communication between the ranks of a group, each made of one all-reduce or all-gather.

Every operator takes a group of None: the axis has one rank, and nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of tensors that need no gradient."""
    if group is None:
        return x
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def joined(x: Tensor, dim: int, group: Group) -> Tensor:
    """The ranks' tensors one after the other along a dimension, in which they may differ in size."""
    if group is None:
        return x
    sizes = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([x.shape[dim]], device=x.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = x.new_zeros(*x.shape[:dim], longest, *x.shape[dim + 1 :])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, int(size)) for part, size in zip(parts, sizes, strict=True)], dim)


def own_part(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """This rank's part of what `joined` gives, of that size: those of the ranks before it come first."""
    if group is None:
        return x
    before = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(before, torch.tensor([size], device=x.device), group=group)
    start = sum(int(each) for each in before[: dist.get_rank(group)])
    return x.narrow(dim, start, size).contiguous()


class SumForward(torch.autograd.Function):
    """Each rank has a summand; all use the sum in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # type: ignore[override]
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Gather(torch.autograd.Function):
    """Joins the ranks' parts. With `sums` each rank uses the whole in a part of the work, so that gradients are added;
    otherwise all use it in the same way, and each rank has the gradient of its part already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, sums: bool) -> Tensor:  # type: ignore[override]
        ctx.dim, ctx.size, ctx.group, ctx.sums = dim, x.shape[dim], group, sums
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        whole = summed(gradient, ctx.group) if ctx.sums else gradient
        return own_part(whole, ctx.dim, ctx.size, ctx.group), None, None, None


class Scatter(torch.autograd.Function):
    """This rank's part of `size` of the whole; with `sums`, of the sum of the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: Group, sums: bool) -> Tensor:  # type: ignore[override]
        ctx.dim, ctx.group = dim, group
        return own_part(summed(x, group) if sums else x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return joined(gradient, ctx.dim, ctx.group), None, None, None, None


def equal_part(x: Tensor, dim: int, group: Group, sums: bool = False) -> Tensor:
    """`Scatter` to parts of one size, but for the remainder."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    size = x.shape[dim] // ranks + (rank < x.shape[dim] % ranks)
    return Scatter.apply(x, dim, size, group, sums)
