"""Views of any strides, drawn at random: lists of layouts have those that somebody thought of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor


def any_strides(x: Tensor) -> Tensor:
    """The values of x in memory whose order of dimensions, steps, gaps and offset are drawn from torch's generator."""
    return _laid(x, torch.randperm(x.ndim).tolist(), torch.randint(1, 3, (x.ndim,)).tolist())


def any_strides_of_rows(x: Tensor) -> Tensor:
    """As `any_strides`, with the last dimension contiguous, as kernels want it."""
    leading = x.ndim - 1
    return _laid(x, [*torch.randperm(leading).tolist(), leading], [*torch.randint(1, 3, (leading,)).tolist(), 1])


def _expanded(x: Tensor, dim: int) -> Tensor:
    """Index 0 along `dim`, expanded: its stride is 0."""
    return x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)


def _windows(x: Tensor) -> Tensor:
    """Rows that overlap, each a column further than the one before it: no stride is 0."""
    rows, columns = x.shape[-2:]
    return x.flatten(-2)[..., : rows - 1 + columns].unfold(-1, columns, 1)


EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "one_for_all_rows": lambda x: _expanded(x, -2) if x.ndim > 1 else x,
    "one_for_all_heads": lambda x: _expanded(x, -3) if x.ndim > 2 else x,
    "one_for_all_sequences": lambda x: _expanded(x, 0) if x.ndim > 3 else x,
    "windows": lambda x: _windows(x) if x.ndim > 1 and x.numel() else x,
}
"""Views whose elements share memory."""


def alike_and_each_its_own(how: str, layouts: Sequence[str], number: int = 4) -> list[list[str]]:
    """Layouts of several tensors: `how` for all, as of one projection's parts, and one for each, beginning with `how`.

    A kernel that reads one tensor by the strides of another is right where they are alike."""
    first = list(layouts).index(how)
    return [[how] * number, [layouts[(first + i) % len(layouts)] for i in range(number)]]


def _laid(x: Tensor, order: list[int], steps: list[int]) -> Tensor:
    """The dimensions lie in memory in that order, outermost first; elements of each are `steps` apart."""
    gaps, offset = torch.randint(0, 3, (x.ndim,)).tolist(), int(torch.randint(0, 3, ()))
    strides, length = [0] * x.ndim, 1
    for dim in reversed(order):
        strides[dim] = length * steps[dim]
        length *= max(1, x.shape[dim]) * steps[dim] + gaps[dim]
    memory = torch.zeros(offset + length, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides, offset).copy_(x)


def far_apart(dim: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors of one dtype in one memory, of which the three indices along `dim` are 2**30 elements apart: offsets
    of the third are beyond 32 bits. On a CPU pages that nothing is written to take no memory. Skip the test where 4 GiB
    of half precision cannot be mapped."""
    length, first = 2**31 + sum(x.numel() for x in tensors), tensors[0]
    try:
        if first.device.type == "cpu":
            memory = torch.from_numpy(np.zeros(length, dtype=f"i{first.itemsize}")).view(first.dtype)
        else:
            memory = torch.empty(length, dtype=first.dtype, device=first.device)
    except (MemoryError, torch.OutOfMemoryError):
        pytest.skip(f"cannot map {length:,} elements")
    found, offset = [], 0
    for x in tensors:
        strides = [*torch.empty(x.shape, device="meta").stride()]
        strides[dim] = 2**30
        found.append(memory.as_strided(x.shape, strides, offset).copy_(x))
        offset += x.numel()
    return found
