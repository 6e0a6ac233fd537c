"""List the operators and collectives that a calibration times: those of training steps, by size and dtype.

A simulation runs small programs, and each operator that it launches is a point. So backward's operators come with the
layouts that autograd gives them, and a GPU's with the kernels that PyTorch chooses there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from shardmark.api.registry import Unsupported
from shardmark.api.workload import Mark
from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.program import Call, Layout, Recorder

Program = Callable[[Mark], None]


@dataclass(frozen=True)
class Sizes:
    """The sizes that are tried on a kind of device, each list from small to large."""

    rows: Sequence[tuple[int, int]]
    """Rows and width of activations."""
    linears: Sequence[tuple[int, int, int]]
    """Rows, inputs and outputs of linears."""
    attention: Sequence[tuple[int, int, int, int]]
    """Batch, heads, sequence and head width."""
    parameters: Sequence[int]
    """Elements of a parameter that an optimizer updates."""
    sent: Sequence[int]
    """Elements of collectives."""


_OF_CPU = Sizes(
    rows=((8, 16), (64, 64), (256, 64), (256, 256), (512, 256), (512, 1024), (2048, 1024)),
    linears=(
        *((8, 16, 16), (64, 64, 64), (256, 64, 64), (256, 64, 256), (256, 256, 64), (256, 64, 1000)),
        *((64, 256, 256), (512, 256, 256), (512, 256, 1024), (512, 1024, 256), (512, 256, 10_000)),
        *((64, 768, 3072), (512, 768, 768), (512, 768, 3072), (512, 3072, 768), (2048, 1024, 1024)),
    ),
    attention=((4, 2, 32, 32), (4, 2, 128, 32), (4, 4, 128, 64), (4, 2, 512, 32), (4, 8, 512, 64), (2, 4, 1024, 64)),
    parameters=(256, 4096, 65_536, 2**18, 2**20, 5 * 2**20),
    sent=(256, 2**12, 2**15, 2**18, 2**20, 2**22),
)
_OF_CUDA = Sizes(
    rows=((8, 16), (512, 768), (2048, 1600), (4096, 4096), (16_384, 4096), (16_384, 8192)),
    linears=(
        *((8, 16, 16), (512, 768, 768), (512, 768, 3072), (2048, 1024, 1024), (2048, 1600, 6400)),
        *((2048, 6400, 1600), (4096, 768, 50_304), (4096, 4096, 4096), (4096, 4096, 14_336)),
        *((4096, 14_336, 4096), (8192, 8192, 8192), (16_384, 4096, 4096), (16_384, 8192, 1024)),
    ),
    attention=((4, 12, 512, 64), (4, 16, 1024, 64), (2, 32, 2048, 128), (1, 32, 8192, 128)),
    parameters=(256, 2**16, 2**20, 2**24, 2**27),
    sent=(256, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26),
)
SIZES = {"cpu": _OF_CPU, "cuda": _OF_CUDA}

VOCABULARY = 10_000
"""Rows of the embeddings that are tried."""

COMPOSED = 2**24
"""Most scores of attention that is composed of products and softmax."""


def operators(on: Hardware, sizes: Sizes, dtypes: Sequence[torch.dtype]) -> dict[Call, Cost]:
    """The distinct operators to time, with their work."""
    found: dict[Call, Cost] = {}
    recorder = Recorder()
    with simulation(on=on, schedule=recorder):
        for dtype in dtypes:
            for program in _programs(sizes, dtype):
                try:
                    events = recorder.record(program)
                except (RuntimeError, Unsupported):  # PyTorch has no such operator in this dtype here
                    continue
                for event in events:
                    if event.call is not None and event.cost is not None and _can_be_timed(event.call):
                        found.setdefault(_with_indices(event.call), event.cost)
    return found


def collectives(on: Hardware, sizes: Sizes, ranks: int) -> dict[Call, tuple[str, int]]:
    """The distinct collectives to time among that many ranks, each with its name and bytes."""

    def program(elements: int) -> None:
        # In float32: Gloo and NCCL add bfloat16 at other rates, and most programs send both.
        own, all_of_it = torch.empty(elements // ranks), torch.empty(elements // ranks * ranks)
        dist.all_reduce(torch.empty(elements))
        dist.all_gather_into_tensor(all_of_it, own)
        dist.reduce_scatter_tensor(own, all_of_it)
        dist.broadcast(all_of_it, 0)

    def all_sizes(mark: Mark) -> None:
        for elements in sizes.sent:
            program(elements)

    recorder = Recorder()
    with warnings.catch_warnings(action="ignore"), simulation(ranks, on=on, schedule=recorder):
        events = recorder.record(all_sizes)  # under names that PyTorch 2.11 has too
    return {event.call: (event.name, event.nbytes) for event in events if event.call is not None and event.ranks}


def _programs(sizes: Sizes, dtype: torch.dtype) -> Iterator[Program]:
    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def backward(result: Tensor, *inputs: Tensor) -> None:
        torch.autograd.grad(result, inputs, torch.empty_like(result))

    def linear(rows: int, width: int, out: int) -> None:
        x, weight, bias = tensor(rows, width), tensor(out, width), tensor(out)
        backward(F.linear(x, weight), x, weight)
        backward(F.linear(x, weight, bias), x, weight, bias)

    def elements(rows: int, width: int) -> None:
        x, y = tensor(rows, width), tensor(rows, width)
        for function in (F.gelu, F.silu, F.relu, torch.exp, torch.sigmoid, torch.tanh, torch.square, torch.neg):
            backward(function(x), x)
        backward(F.gelu(x, approximate="tanh"), x)
        for result in (x + y, x * y, x - y, x / y, torch.where(x > y, x, y)):
            backward(result, x, y)
        for result in (x * 0.5, x + 1.0, x**2, x.masked_fill(x > 0, 0.0), F.dropout(x, 0.1)):
            backward(result, x)
        backward(torch.cat([x, y], dim=-1), x, y)
        with torch.no_grad():
            x.add_(y).mul_(0.5).copy_(y).zero_()
            x.clone()
            for other in (torch.float32, torch.bfloat16):
                if other != dtype:
                    x.to(other).to(dtype)

    def reductions(rows: int, width: int) -> None:
        x, weight, bias = tensor(rows, width), tensor(width), tensor(width)
        backward(F.layer_norm(x, (width,), weight, bias), x, weight, bias)
        backward(F.rms_norm(x, (width,), weight), x, weight)
        for result in (F.softmax(x, -1), F.log_softmax(x, -1), x.mean(-1), x.sum(), x.sum(0), x.norm()):
            backward(result, x)
        backward(F.cross_entropy(x, torch.zeros(rows, dtype=torch.int64)), x)

    def embedding(rows: int, width: int) -> None:
        table = tensor(VOCABULARY, width)
        backward(F.embedding(torch.zeros(rows, dtype=torch.int64), table), table)

    def attention(batch: int, heads: int, sequence: int, width: int) -> None:
        q, k, v = (tensor(batch, sequence, heads, width).transpose(1, 2) for _ in range(3))
        backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
        q.contiguous()
        if batch * heads * sequence**2 <= COMPOSED:
            scores = F.softmax(q @ k.mT, -1)
            backward(scores @ v, q, k, v)

    def optimizer(elements: int) -> None:
        parameter = torch.nn.Parameter(torch.empty(elements, dtype=dtype))
        parameter.grad = torch.empty_like(parameter)
        torch.optim.AdamW([parameter], fused=True).step()
        torch.optim.AdamW([parameter], foreach=True).step()
        parameter.grad.zero_()

    grids: list[tuple[Callable[..., None], Sequence[tuple[int, ...]]]] = [
        (linear, sizes.linears),
        (elements, sizes.rows),
        (reductions, sizes.rows),
        (embedding, sizes.rows),
        (attention, sizes.attention),
        (optimizer, [(each,) for each in sizes.parameters]),
    ]
    for program, grid in grids:
        yield from (partial(_without_mark, program, size) for size in grid)


def _without_mark(program: Callable[..., None], size: tuple[int, ...], mark: Mark) -> None:
    program(*size)


def _can_be_timed(call: Call) -> bool:
    """False for an operator that makes a tensor on a device it names, or draws from a generator."""
    named = [value for _, value in call.kwargs]
    return not any(isinstance(value, torch.device | torch.Generator) for value in (*call.args, *named))


def _with_indices(call: Call) -> Call:
    """The call with integers over all rows of an embedding, or columns of a loss: a simulation knows no values."""

    def spread(layout: Layout) -> Layout:
        counts = layout.dtype == torch.int64 and layout.shape
        return replace(layout, largest=most) if counts else layout

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(replaced, value))
        return tree_map_only(Layout, spread, value)

    widths = [each.shape for each in call.args if isinstance(each, Layout) and each.dtype.is_floating_point]
    most = VOCABULARY - 1
    if widths and "nll" in call.name:
        most = min(shape[-1] for shape in widths if len(shape) == 2) - 1
    return replace(call, args=replaced(call.args))
