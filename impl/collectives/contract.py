"""The contract of collectives, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import buffered_peak
from shardmark.registry import Family, RegistryError, add_family


class Handle(Protocol):
    """Handle of an asynchronous collective. Until `wait` returns, do not touch the tensors that it reads and writes."""

    def wait(self) -> Any:
        """Return when the result is written (on CUDA: what the current stream does next comes after that)."""
        ...


class Collectives(Protocol):
    """An object with three methods. The first two reduce by summing.

    Each returns when its result is written; with `async_op` it returns a `Handle` at once. Every rank must start the
    same collectives in the same order. `output` and `input` are contiguous and of one dtype, and with n ranks one of
    them is n times as large as the other.
    """

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Replace `tensor`, of any shape, by its sum over the ranks."""
        ...

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Put into rank i's `output` the sum over the ranks of the i-th of n equal parts of `input`.

        `output` may be that part of `input`; the rest of `input` may be overwritten then.
        """
        ...

    def all_gather(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
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
