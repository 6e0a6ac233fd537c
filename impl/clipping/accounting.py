"""Clipping in closed form: bytes at the peak of one rank, bytes moved."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from impl.accounting.ledger import Bytes
from impl.model.sizes import SIZES
from impl.optim.accounting import shapes
from shardmark.api import Mesh, Work

if TYPE_CHECKING:
    from impl.clipping.cases import ClippingCase

_NUMBER = 4  # bytes of a norm, a float32


def local_shape(shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The first rank's part of a parameter: rows over `shard`, and columns of matrices over `tp`."""
    sizes = mesh.sizes
    rows, *columns = shape
    return (-(-rows // sizes.get("shard", 1)), *(-(-each // sizes.get("tp", 1)) for each in columns))


def elements(case: ClippingCase) -> int:
    """Number of values of gradients on the first rank."""
    return sum(prod(local_shape(shape, Mesh.parse(case.mesh))) for shape in shapes(SIZES[case.model]))


def by_axes_peak(case: ClippingCase) -> Bytes:
    """Peak of `by_axes`, in bytes: parameters and gradients, and numbers for each gradient of the largest set of axes,
    that of matrices where norms' weights are whole along `tp`."""
    itemsize = getattr(torch, case.dtype).itemsize
    apart = Mesh.parse(case.mesh).sizes.get("tp", 1) > 1
    count = sum(len(shape) == 2 or not apart for shape in shapes(SIZES[case.model]))
    return Bytes(
        {
            "parameters": itemsize * elements(case),
            "gradients": itemsize * elements(case),
            "each gradient's norm": _NUMBER * count,
            "their squares": _NUMBER * count,
            "the sum of these": _NUMBER,
        }
    )


def work(case: ClippingCase) -> Work:
    """Each gradient is read for its norm, read again and written, on every rank; what is sent is negligible."""
    mesh, itemsize = Mesh.parse(case.mesh), getattr(torch, case.dtype).itemsize
    return Work(bytes_moved=3 * itemsize * elements(case) * mesh.size)
