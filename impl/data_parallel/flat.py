"""One all-reduce for all gradients, after backward: one latency, and a copy of every gradient."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from impl.data_parallel.accounting import flat_peak
from impl.data_parallel.base import DataParallel, gradient
from impl.distributed import check_dense
from shardmark.api import Race, register


class FlatDataParallel(DataParallel):
    """Gradients of one dtype are copied into one tensor, all-reduced together, and copied back."""

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        super()._on_gradient(parameter)
        check_dense(parameter)

    def _average(self) -> None:
        by_dtype = sorted(self.trainable, key=lambda p: str(p.dtype))
        for _, group in groupby(by_dtype, key=lambda p: p.dtype):
            parameters = list(group)
            flat = torch.cat([gradient(p).flatten() for p in parameters])
            dist.all_reduce(flat, group=self.process_group)
            for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                torch.div(total.view_as(p), self.world_size, out=p.grad)


register(
    "data_parallel",
    "flat",
    FlatDataParallel,
    memory=flat_peak,
    time=Race("naive", budget=2.0, goal=1.0),
    tested_briefly=True,
    called="data parallelism with one flat gradient",
)
