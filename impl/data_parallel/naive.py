"""One all-reduce for each parameter, after backward: the reference."""

from __future__ import annotations

import torch.distributed as dist

from impl.data_parallel.accounting import naive_peak
from impl.data_parallel.base import DataParallel, gradient, row_major
from shardmark.api import Race, register


class NaiveDataParallel(DataParallel):
    """No communication overlaps backward, and each parameter costs the latency of a collective."""

    def _average(self) -> None:
        for parameter in self.trainable:
            total = row_major(gradient(parameter))
            dist.all_reduce(total, group=self.process_group)
            if total is not parameter.grad:
                gradient(parameter).copy_(total)
            gradient(parameter).div_(self.world_size)


# No budget of its time: by how much it is slower than DDP is the cost of a message, of which it sends one a parameter.
register(
    "data_parallel",
    "naive",
    NaiveDataParallel,
    memory=naive_peak,
    time=Race("ddp"),
    tested_briefly=True,
    called="naive data parallelism",
)
