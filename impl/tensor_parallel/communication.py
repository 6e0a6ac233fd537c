"""Communication between the ranks of `tp`, and how it is differentiated.

Tensors are (tokens, ...). A slice is a rank's share of the tokens: of each of several chunks of them, the rank's part.
Each token is normalized by itself, so that it does not matter which ones a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives.contract import Handle
from impl.collectives.messages import is_on_gloo

Group = dist.ProcessGroup


Handles = Sequence[Handle]


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, a new one."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """The product and the bias, in the product's dtype, as a linear layer has them under autocast."""
    return product if bias is None else product + bias.to(product.dtype)


class Sum(torch.autograd.Function):
    """The sum of the ranks' summands, which all ranks use alike: g of Shoeybi et al., "Megatron-LM", 2019."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SumGradient(torch.autograd.Function):
    """A tensor that each rank uses in its part of the work: its gradient is the sum of theirs. f of Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class GatherColumns(torch.autograd.Function):
    """Every column, (tokens, columns), of the ranks' own, of which the last ranks may have fewer. All ranks use them
    alike."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, columns: int, group: Group) -> Tensor:
        ranks, tokens = group.size(), own.shape[0]
        most = -(-columns // ranks)
        ctx.first, ctx.own = group.rank() * most, own.shape[1]
        padded = torch.nn.functional.pad(own, (0, most - own.shape[1])).contiguous()
        every_rank = own.new_empty(ranks * tokens, most)
        dist.all_gather_into_tensor(every_rank, padded, group=group)
        return every_rank.view(ranks, tokens, most).transpose(0, 1).reshape(tokens, -1)[:, :columns]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(1, ctx.first, ctx.own), None, None


def gather(own: Tensor, chunks: int, group: Group) -> tuple[Tensor, Handles]:
    """All tokens from the ranks' slices, and a handle of each chunk of them."""
    own = own.contiguous()
    every = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
    pairs = zip(every.chunk(chunks), own.chunk(chunks), strict=True)
    handles = [dist.all_gather_into_tensor(*pair, group=group, async_op=True) for pair in pairs]
    return every, handles


class SumOfParts:
    """Handle of an exchange of parts (ranks, ...), whose sum is written into `own` once they are there."""

    def __init__(self, parts: Tensor, own: Tensor, exchange: dist.Work) -> None:
        self.parts, self.own, self.exchange = parts, own, exchange

    def wait(self) -> None:
        self.exchange.wait()
        torch.sum(self.parts.view(-1, *self.own.shape), 0, out=self.own)
        del self.parts


def scatter(sums: Tensor, own: Tensor, group: Group) -> Handle:
    """Begin to write this rank's part of the sum of the ranks' tensors into `own`.

    Gloo's reduce-scatter is an all-reduce inside, which sends twice the bytes: there each rank is sent its parts. The
    rings of `impl.collectives` send as few, but by a thread of Python, and on a link products hid nothing of that.
    """
    sums = sums.contiguous()
    if sums.device.type == "cpu" and is_on_gloo(group):
        parts = torch.empty_like(sums)
        return SumOfParts(parts, own, dist.all_to_all_single(parts, sums, group=group, async_op=True))
    return dist.reduce_scatter_tensor(own, sums, group=group, async_op=True)


def wait(handles: Handles) -> None:
    for handle in handles:
        handle.wait()


class ScatterSums(torch.autograd.Function):
    """This rank's slice of the sum of the ranks' summands (Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models", 2022)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: int, group: Group) -> Tensor:
        ctx.chunks, ctx.group = chunks, group
        own = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        parts = zip(x.contiguous().chunk(chunks), own.chunk(chunks), strict=True)
        wait([scatter(*pair, group) for pair in parts])
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        every, handles = gather(gradient, ctx.chunks, ctx.group)
        wait(handles)
        return every, None, None
