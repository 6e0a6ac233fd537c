"""The collectives of the process group's own backend: NCCL's or Gloo's."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import backend_peak
from impl.collectives.contract import Handle
from shardmark.api import register


class Backend:
    """Contract: `impl.collectives.Collectives`."""

    # Inputs are detached: autograd would follow Gloo's copies into the output.

    @staticmethod
    def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> Handle | None:
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    @staticmethod
    def reduce_scatter(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        return dist.reduce_scatter_tensor(output, input.detach(), group=group, async_op=async_op)

    @staticmethod
    def all_gather(
        output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        return dist.all_gather_into_tensor(output, input.detach(), group=group, async_op=async_op)


register("collectives", "backend", Backend, memory=backend_peak, tested_briefly=True, called="PyTorch's collective")
