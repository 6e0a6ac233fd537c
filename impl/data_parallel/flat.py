"""One all-reduce for all gradients, after backward: one latency, and a copy of every gradient."""

from __future__ import annotations

from itertools import groupby

import torch.distributed as dist

from impl.accounting.data_parallel import flat_peak
from impl.data_parallel.base import DataParallel
from impl.data_parallel.bucketed import Bucket
from shardmark.budget import TimeBudget
from shardmark.registry import register


class FlatDataParallel(DataParallel):
    """Gradients of one dtype are copied into one tensor, communicated at once, and copied back."""

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients over the ranks in one collective a dtype."""
        if not self.synchronizing:
            return
        for _, group in groupby(sorted(self.trainable, key=lambda p: str(p.dtype)), key=lambda p: p.dtype):
            bucket = Bucket(list(group), self.process_group)
            bucket.launch()
            bucket.finish(self.world_size)


register("data_parallel", "flat", FlatDataParallel, memory=flat_peak, time=TimeBudget("naive", 1.1))
