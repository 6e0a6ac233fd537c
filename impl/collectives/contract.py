"""The contract of collectives: what a user calls, the check of a target, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import buffered_peak
from shardmark.registry import Family, RegistryError, add_family


class Work(Protocol):
    """A collective that is under way. What it reads and writes must be left alone until it is waited for."""

    def wait(self) -> Any:
        """Return when the result is there (on CUDA: order it before what the current stream does next)."""
        ...


class Collectives(Protocol):
    """An object with three methods; all sum. Each returns when its result is there, as `Work.wait` does.

    With `async_op` each returns a Work at once. Every rank must begin the same collectives in the same order. With n
    ranks, `output` and `input` are contiguous, of one dtype, and one is n times as large as the other.
    """

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Work | None:
        """Replace `tensor`, of any shape, by its sum over the ranks."""
        ...

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Work | None:
        """Put into rank i's `output` the sum over the ranks of the i-th of n equal parts of `input`.

        `output` may be that part of `input`; the rest of `input` may be overwritten then.
        """
        ...

    def all_gather(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Work | None:
        """Put every rank's `input`, in rank order, into `output` on every rank; `input` may be its part of `output`."""
        ...


def _check(target: Any, device: str) -> None:
    for name, arguments in {"all_reduce": 2, "reduce_scatter": 3, "all_gather": 3}.items():
        method = getattr(target, name, None)
        if not callable(method):
            raise RegistryError(f"it has no {name}()")
        try:
            inspect.signature(method).bind(*[None] * arguments)
        except TypeError as error:
            raise RegistryError(f"{name}() does not take {arguments} arguments: {error}") from None


FAMILY = add_family(Family("collectives", Collectives, reference="backend", check=_check, memory=buffered_peak))
