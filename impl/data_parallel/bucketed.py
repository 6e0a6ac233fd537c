"""One all-reduce a bucket, during backward: few latencies, and communication hides behind computation.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import nn

from impl.accounting.data_parallel import bucketed_peak
from impl.data_parallel.base import BACKWARD_TWICE, DataParallel, call_on_gradient
from shardmark.registry import TimeBudget, register


class Bucket:
    """Gradients of one dtype that are communicated together: each lives in its slot of one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.slots = {p: slot.view_as(p) for p, slot in zip(parameters, self.flat.split(sizes), strict=True)}
        self.missing = set(parameters)  # those whose gradient backward has yet to produce
        self.work: dist.Work | None = None

    def take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into its slot, where it stays: nothing is copied back."""
        slot = self.slots[parameter]
        if parameter.grad is None:
            slot.zero_()  # this rank's loss did not reach it
        elif parameter.grad is not slot:
            slot.copy_(parameter.grad)
        parameter.grad = slot
        self.missing.discard(parameter)

    def launch(self, process_group: dist.ProcessGroup | None) -> None:
        """Begin the all-reduce."""
        for parameter in list(self.missing):
            self.take(parameter)
        self.work = dist.all_reduce(self.flat, group=process_group, async_op=True)

    def finish(self, world_size: int) -> None:
        """Wait for the sum and make it the average."""
        assert self.work is not None
        self.work.wait()
        self.flat.div_(world_size)
        self.work = None
        self.missing = set(self.slots)


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
        self._buckets = [Bucket(run) for run in partition(self.trainable[::-1], bucket_mb * 2**20)]
        self._next = 0  # the first bucket not launched yet
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.slots}
        for parameter in self.trainable:
            call_on_gradient(parameter, self._on_gradient)

    def finish_gradient_synchronization(self) -> None:
        """Launch what backward did not fill (parameters the loss did not reach), then wait for every bucket."""
        if not self.synchronizing:
            return
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            bucket.finish(self.world_size)
        self._next = 0

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.synchronizing:
            return
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(BACKWARD_TWICE)
        bucket.take(parameter)
        full = takewhile(lambda b: not b.missing, self._buckets[self._next :])
        self._launch(self._next + len(list(full)))

    def _launch(self, end: int) -> None:
        """Launch the buckets before `end` that are not yet."""
        for bucket in self._buckets[self._next : end]:
            bucket.launch(self.process_group)
        self._next = end


register("data_parallel", "bucketed", BucketedDataParallel, memory=bucketed_peak, time=TimeBudget("ddp", 1.1))
