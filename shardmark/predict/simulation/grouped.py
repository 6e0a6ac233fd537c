"""The layout and the work of a grouped product, in which each group of rows or columns has a matrix of its own.

PyTorch's meta kernel refuses dtypes other than bfloat16, which its CPU kernel takes; and its counter of FLOPs knows no
grouped product.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

GROUPED = torch.ops.aten._grouped_mm.default
ALIGNED = 16
"""Bytes to which rows of the result are padded, as the kernels ask."""


def grouped_layout(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty result: (m, n) where one of the two has groups in its first dimension, (groups, m, n) for both or
    none."""
    groups = () if a.dim() + b.dim() == 5 else (_groups(a, b, offsets),)
    rows, columns, dtype = a.size(-2), b.size(-1), dtype or a.dtype
    wide = ceil(columns * dtype.itemsize / ALIGNED) * ALIGNED // dtype.itemsize
    return torch.empty((*groups, rows, wide), dtype=dtype, device=a.device)[..., :columns]


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None) -> tuple[int, int, int, int]:
    """Products, and m, n and k of each, where groups are of equal size: which experts get how many tokens is not
    known."""
    groups = _groups(a, b, offsets)
    m, n, k = a.size(-2), b.size(-1), a.size(-1)
    if a.dim() == 2 and b.dim() == 3:
        m = ceil(m / groups)
    elif a.dim() == 3 and b.dim() == 2:
        n = ceil(n / groups)
    elif a.dim() == 2:
        k = ceil(k / groups)
    return groups, m, n, k


def grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs: each row meets one group's matrix, whatever the sizes of the groups."""
    batch = a.size(0) if a.dim() == b.dim() == 3 else 1
    return 2 * batch * a.size(-2) * b.size(-1) * a.size(-1)


if GROUPED.overloadpacket not in flop_registry:
    register_flop_formula(GROUPED.overloadpacket, get_raw=True)(grouped_flops)


def _groups(a: Tensor, b: Tensor, offsets: Tensor | None) -> int:
    if offsets is not None:
        return offsets.numel()
    return a.size(0) if a.dim() == 3 else b.size(0)
