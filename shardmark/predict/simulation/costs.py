"""Count an operator's work: matrix products, and bytes read and written.

Work is counted from the shapes of arguments and results. Views, and operators that only lay out memory, have none.
FLOPs of products are PyTorch's own counts (`torch.utils.flop_counter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from shardmark.predict.simulation.grouped import grouped_product
from shardmark.predict.simulation.kinds import Kind, kind_of, tensors_in, written_by

aten = torch.ops.aten

SECTOR = 32
"""Bytes of a GPU's smallest read; a strided tensor uses a part of them."""


@dataclass(frozen=True)
class Product:
    """A batch of matrix products of (m, k) with (k, n)."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def is_narrow(self) -> bool:
        """True where m, n or k is at most 128: a single tile of the product spans it."""
        return min(self.m, self.n, self.k) <= 128


@dataclass(frozen=True)
class Cost:
    """One operator's work on its device. `dtype` is the dtype in which products are computed."""

    dtype: torch.dtype
    flops: float
    """FLOPs of matrix products; other operators count none, as bytes bound them."""
    nbytes: float
    """Bytes read and written, each once."""
    products: tuple[Product, ...] = ()
    """Shapes of plain matrix products; empty for attention and others."""
    reduces: bool = False
    """True where an operator combines a row's values: sums, norms, softmax."""
    scattered: bool = False
    """True for gather and scatter: rows are read or written wherever they lie."""
    attends: bool = False
    """True for attention kernels, which have other work between their products."""
    convolves: bool = False
    """True for convolutions, for which PyTorch has a precision setting of their own."""
    name: str = ""
    """Name of the operator, without its namespace."""


_OF_ROWS = ("embedding", "index_select", "gather", "index", "take")
"""Operators that read only those rows of their first tensor that they return."""
_INTO_ROWS = ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "scatter")
"""Operators that write only the given rows into their first tensor."""
_REDUCE = ("softmax", "norm", "sum", "mean", "amax", "amin", "max", "min", "var", "std", "logsumexp", "argmax", "nll")
"""Parts of the names of operators that combine a row's values."""
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_WRITE_ALONE = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "zeros_like", "ones_like")
"""Operators that overwrite their output without reading it."""


def cost_of(
    operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: Any, on_a_gpu: bool = False
) -> Cost | None:
    """The operator's work; None where the device has nothing to do."""
    kind = kind_of(operator, on_a_gpu)
    if kind in (Kind.RUN, Kind.SEND, Kind.READ):
        return None
    given = list(tensors_in([*args, *kwargs.values()]))
    made = [each for each in tensors_in([results]) if not any(each is one for one in given)]
    numbers = [each for each in (*given, *made) if each.is_floating_point()] or [*given, *made]
    if not numbers or numbers[0].is_meta:
        return None
    name = operator._schema.name.partition("::")[2]
    flops = _flops(operator, args, kwargs, results)
    return Cost(
        numbers[0].dtype,
        flops,
        _bytes(name, written_by(operator, args, kwargs), given, made),
        tuple(_products(name, args)) if flops else (),
        **kind_of_work(name),
    )


def kind_of_work(name: str) -> dict[str, Any]:
    """The fields of a cost that follow from the operator's name."""
    return {
        "reduces": any(part in name for part in _REDUCE) and not name.startswith(_ATTENTION),
        "attends": name.startswith(_ATTENTION),
        "convolves": "convolution" in name,
        "scattered": name in _OF_ROWS or name in _INTO_ROWS,
        "name": name,
    }


def _flops(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> float:
    """FLOPs of the operator. Causal attention counts half of PyTorch's number: its kernels skip masked scores."""
    count = flop_registry.get(operator.overloadpacket)
    if count is None:
        return 0.0
    names = [argument.name for argument in operator._schema.arguments]
    causal = dict(zip(names, args, strict=False)) | kwargs
    return float(count(*args, **kwargs, out_val=results)) / (2 if causal.get("is_causal") else 1)


def _products(name: str, args: Sequence[Any]) -> Iterator[Product]:
    a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    if name in ("mm", "addmm"):
        yield Product(1, a.size(0), b.size(1), a.size(1))
    elif name in ("bmm", "baddbmm"):
        yield Product(a.size(0), a.size(1), b.size(2), a.size(2))
    elif name == "_grouped_mm":
        yield Product(*grouped_product(*args[:3]))


def _bytes(
    name: str, arguments_written: Sequence[tuple[Any, Any]], given: Sequence[Tensor], made: Sequence[Tensor]
) -> float:
    if name in _OF_ROWS:
        return sum(2 * touched(each) for each in made) + sum(map(touched, given[1:]))
    if name in _INTO_ROWS:
        return sum(map(touched, given[1:])) + 2 * touched(given[-1]) + sum(2 * touched(each) for each in made)
    # By their schemas fused optimizers write gradients, to scale them; here they scale none.
    written = [tensors for argument, tensors in arguments_written if argument.name != "grads"]
    outs = any(argument.is_out for argument, _ in arguments_written)
    reads = sum(map(touched, given))
    writes = sum(map(touched, tensors_in(written)))
    if outs or name.startswith(_WRITE_ALONE):
        reads -= writes
    return max(reads, 0.0) + writes + sum(map(touched, made))


def touched(tensor: Tensor) -> float:
    """Bytes of the tensor that a device reads or writes: an expanded value once, whole sectors of a strided tensor."""
    of_own = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride]
    apart = min(strides, default=1)
    return float(of_own * tensor.element_size() * min(apart, max(SECTOR // tensor.element_size(), 1)))
