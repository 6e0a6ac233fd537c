"""Collectives that suit a process group's backend; the other families communicate with them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from impl.collectives.contract import Collectives, Handle
from impl.collectives.library import Backend
from impl.collectives.messages import is_on_gloo
from impl.collectives.ring import Ring


class OnGloo(Backend):
    """Gloo's own all-reduce; and rings for reduce-scatter and all-gather of tensors on the CPU.

    Gloo's reduce-scatter is an all-reduce inside, which sends twice the bytes. Its reduce-scatter and its all-gather
    both hold a copy of the large tensor.
    """

    @staticmethod
    def reduce_scatter(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        return _on(output).reduce_scatter(output, input, group, async_op=async_op)

    @staticmethod
    def all_gather(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        return _on(output).all_gather(output, input, group, async_op=async_op)


def _on(output: Tensor) -> Collectives:
    # A group may have one backend for each device type, as "cpu:gloo,cuda:nccl" has: rings are for the CPU's.
    return Ring() if output.device.type == "cpu" else Backend()


def collectives_for(group: dist.ProcessGroup | None = None) -> Collectives:
    """The collectives that send the fewest bytes, and need the least memory, on that group's backend."""
    return OnGloo() if is_on_gloo(group) else Backend()
