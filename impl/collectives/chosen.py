"""The collectives that suit a process group: what other families communicate with."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from impl.collectives.contract import Collectives, Work
from impl.collectives.library import Backend
from impl.collectives.ring import Ring


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
