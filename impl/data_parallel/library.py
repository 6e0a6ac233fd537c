"""PyTorch's own DistributedDataParallel: the peer of the others."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from impl.distributed import PlainStateDict, broadcast_state, check_same_module
from shardmark.api import Race, register


class TorchDataParallel(PlainStateDict, DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` under the family's contract; `bucket_mb` is its `bucket_cap_mb`.

    With None, PyTorch's default, buckets have 25 MB and the first one 1 MB; with a number all have that size.

    It waits for its collectives at the end of backward. Only with `find_unused_parameters`, which costs time, may the
    loss not reach some parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        check_same_module(module, process_group)
        broadcast_state(module, process_group)
        super().__init__(
            module,
            process_group=process_group,
            broadcast_buffers=False,  # else each forward pass would broadcast rank 0's buffers
            init_sync=False,  # the initial broadcast would otherwise leave out the buffers
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
        )

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do: gradients are averaged when backward returns."""


register(
    "data_parallel",
    "ddp",
    TorchDataParallel,
    time=Race("naive", goal=1.0),
    races={"bucket size": Race("ddp")},  # no race: DDP is the peer of the others
    tested_briefly=True,
    predicted=True,
    called="DDP",
)
