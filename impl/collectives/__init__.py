"""Collectives: all-reduce, reduce-scatter and all-gather between the ranks of a process group.

Bandwidths are the ones NCCL's tests report: the algorithm bandwidth is bytes of one rank over time; the bus bandwidth
multiplies it by the share of them that must cross each link, 2(n-1)/n for an all-reduce.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from impl.accounting.collectives import buffered_peak
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

# They register in the family above.
# isort: off
from impl.collectives.library import Backend  # noqa: E402
from impl.collectives.ring import Ring  # noqa: E402
from impl.collectives.direct import Direct  # noqa: E402
from impl.collectives.messages import count_bytes_sent  # noqa: E402
# isort: on


class OnGloo(Backend):
    """The backend's own all-reduce, and for what is on the CPU rings for the rest: Gloo reduce-scatters by an
    all-reduce, which is twice the bytes, and holds a copy of the large tensor to scatter or gather it."""

    @staticmethod
    def reduce_scatter(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Work | None:
        """Put into rank i's `output` the sum of the i-th part of `input`."""
        return _on(output).reduce_scatter(output, input, group, async_op=async_op)

    @staticmethod
    def all_gather(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Work | None:
        """Put every rank's `input` into `output` on every rank."""
        return _on(output).all_gather(output, input, group, async_op=async_op)


def _on(output: Tensor) -> Collectives:
    """A group may have a backend for each kind of device, as "cpu:gloo,cuda:nccl" has: rings are for the CPU's."""
    return Ring() if output.device.type == "cpu" else Backend()


def collectives_for(group: dist.ProcessGroup | None = None) -> Collectives:
    """The collectives that move the fewest bytes on that group's backend, and need the least memory for it."""
    return OnGloo() if "cpu:gloo" in dist.get_backend_config(group).split(",") else Backend()


__all__ = ["Backend", "Collectives", "Direct", "OnGloo", "Ring", "Work", "collectives_for", "count_bytes_sent"]
