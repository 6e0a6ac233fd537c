"""Sequence parallelism: norms and residuals on a slice of the tokens, which are gathered before column-parallel
products, and whose sums are scattered after row-parallel ones (Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", 2022). It sends as much as `plain`, but for gathering once more in backward what was not
kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import dropout

from impl.mesh.decoder import Decoder
from impl.tensor_parallel.communication import Group, ScatterSums, SumGradient, gather, scatter, wait, with_bias
from impl.tensor_parallel.decoder import TensorParallelDecoder
from impl.tensor_parallel.drawing import drawing_apart
from impl.tensor_parallel.plain import parallelize_plain
from shardmark.api import Race, register


class ColumnProducts(torch.autograd.Function):
    """Products of the gathered tokens. Backward has the slice alone, and gathers it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: int, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.group = chunks, group
        ctx.save_for_backward(x, *weights)
        every, handles = gather(x, chunks, group)
        outputs = [x.new_empty(every.shape[0], weight.shape[0]) for weight in weights]
        for index, (part, handle) in enumerate(zip(every.chunk(chunks), handles, strict=True)):
            handle.wait()
            for out, weight in zip(outputs, weights, strict=True):
                torch.mm(part, weight.t(), out=out.chunk(chunks)[index])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, _, *needed = ctx.needs_input_grad
        every, gathered = gather(x, ctx.chunks, ctx.group) if any(needed) else (x, [])
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        sums, scattered = [], []  # the sums are alive until they are sent
        for index, own in enumerate(() if of_x is None else of_x.chunk(ctx.chunks)):
            parts = [gradient.chunk(ctx.chunks)[index] for gradient in gradients]
            sums.append(torch.mm(parts[0], weights[0]))
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                sums[-1].addmm_(part, weight)
            scattered.append(scatter(sums[-1], own, ctx.group))
        wait(gathered)
        of_weights = [gradient.t() @ every if need else None for gradient, need in zip(gradients, needed, strict=True)]
        wait(scattered)
        return of_x, None, None, *of_weights


class RowProduct(torch.autograd.Function):
    """This rank's slice of the sum of the ranks' products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int, group: Group) -> Tensor:
        ctx.chunks, ctx.group = chunks, group
        ctx.save_for_backward(x, weight)
        own = x.new_empty(x.shape[0] // group.size(), weight.shape[0])
        summands, handles = [], []  # alive until they are sent
        for part, out in zip(x.chunk(chunks), own.chunk(chunks), strict=True):
            summands.append(part @ weight.t())
            handles.append(scatter(summands[-1], out, group))
        wait(handles)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        every, handles = gather(gradient, ctx.chunks, ctx.group)
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for index, (part, handle) in enumerate(zip(every.chunk(ctx.chunks), handles, strict=True)):
            handle.wait()
            if of_x is not None:
                torch.mm(part, weight, out=of_x.chunk(ctx.chunks)[index])
        return of_x, every.t() @ x if ctx.needs_input_grad[1] else None, None, None


@dataclass(frozen=True)
class Sliced:
    """Each rank has a slice of the tokens, of which each chunk is sent by itself. See
    `impl.tensor_parallel.decoder.Products`."""

    group: Group
    chunks: int = 1

    @property
    def multiple(self) -> int:
        return self.chunks * self.group.size()

    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        x, *weights = as_autocast(x, *weights)
        return ColumnProducts.apply(x, self.chunks, self.group, *weights)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = RowProduct.apply(*as_autocast(x, weight), self.chunks, self.group)
        return with_bias(out, None if bias is None else self.whole(bias))

    def reduce(self, summand: Tensor) -> Tensor:
        return ScatterSums.apply(summand, self.chunks, self.group)

    def whole(self, parameter: Tensor) -> Tensor:
        """Each rank's slice adds to its gradient."""
        return SumGradient.apply(parameter, self.group)

    def dropped(self, x: Tensor, p: float) -> Tensor:
        with drawing_apart(x.device, self.group):
            return dropout(x, p)


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that autocast has products in, where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    return [each.to(torch.get_autocast_dtype(device)) for each in tensors]


def sliced(model: Decoder, mesh: DeviceMesh, chunks: int) -> nn.Module:
    """One rank alone has nothing to slice."""
    if mesh.size() == 1:
        return parallelize_plain(model, mesh)
    return TensorParallelDecoder(model, mesh, Sliced(mesh.get_group(), chunks))


def parallelize_sequence(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """See `impl.tensor_parallel.Parallelize`."""
    return sliced(model, mesh, chunks=1)


register(
    "tensor_parallel",
    "sequence",
    parallelize_sequence,
    time=Race("plain"),
    called="sequence parallelism",
)
