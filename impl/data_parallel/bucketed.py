"""One all-reduce a bucket, during backward: few latencies, and communication hides behind computation.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.accounting.data_parallel import bucketed_peak
from impl.data_parallel.base import DataParallel, gradient
from shardmark.budget import TimeBudget
from shardmark.cases import MB
from shardmark.registry import register


class Bucket:
    """Gradients of one dtype that are communicated together, from one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter], process_group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self.process_group = process_group
        self.missing = len(parameters)  # gradients that backward has yet to produce
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def launched(self) -> bool:
        """Whether its all-reduce is under way."""
        return self._work is not None

    def launch(self) -> None:
        """Begin the all-reduce of a copy of the gradients."""
        self._flat = torch.cat([gradient(p).flatten() for p in self.parameters])
        self._work = dist.all_reduce(self._flat, group=self.process_group, async_op=True)

    def finish(self, world_size: int) -> None:
        """Wait for the sum and put the average in each parameter's gradient."""
        assert self._work is not None and self._flat is not None
        self._work.wait()
        self._flat.div_(world_size)
        for p, average in zip(self.parameters, self._flat.split([p.numel() for p in self.parameters]), strict=True):
            gradient(p).copy_(average.view_as(p))
        self._flat = self._work = None
        self.missing = len(self.parameters)


def partition(parameters: Iterable[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Parameters in order, in runs of one dtype of at most `bucket_bytes`; one that is larger has its own."""
    runs: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        nbytes = p.numel() * p.element_size()
        if not runs or p.dtype != runs[-1][0].dtype or size + nbytes > bucket_bytes:
            runs.append([])
            size = 0
        runs[-1].append(p)
        size += nbytes
    return runs


class BucketedDataParallel(DataParallel):
    """`bucket_mb`: a bucket's size in MB of 2^20 bytes, as PyTorch's `bucket_cap_mb`. ValueError unless positive.

    Backward runs from the last layer to the first, so buckets are filled in the reverse order of the parameters. They
    are launched in that order on every rank, whichever gradients come first, so that the ranks' collectives match.
    """

    def __init__(
        self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None, bucket_mb: float = 25
    ) -> None:
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb is a positive number of megabytes, not {bucket_mb}")
        super().__init__(module, process_group=process_group)
        self._buckets = [
            Bucket(parameters, self.process_group) for parameters in partition(self.trainable[::-1], bucket_mb * MB)
        ]
        self._next = 0  # the first bucket not launched yet
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))

    def finish_gradient_synchronization(self) -> None:
        """Launch what backward did not fill (parameters the loss did not reach), then wait for every bucket."""
        if not self.synchronizing:
            return
        for bucket in self._buckets[self._next :]:
            bucket.launch()
        for bucket in self._buckets:
            bucket.finish(self.world_size)
        self._next = 0

    def _on_gradient(self, bucket: Bucket) -> None:
        if not self.synchronizing:
            return
        bucket.missing -= 1
        if bucket.launched or bucket.missing < 0:
            raise RuntimeError(
                "backward ran twice before finish_gradient_synchronization(); run all but the last in no_sync()"
            )
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].launch()
            self._next += 1


register("data_parallel", "bucketed", BucketedDataParallel, memory=bucketed_peak, time=TimeBudget("ddp", 1.25))
