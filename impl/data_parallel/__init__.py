"""Data parallelism: every rank has a copy of the module, computes on its share of the batch, and averages gradients.

    model = BucketedDataParallel(model, bucket_mb=25)
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The bucketed wrapper also takes `model.finish_gradient_synchronization(optimizer)`, which updates one bucket's
parameters while the next buckets are being reduced.

From the simplest to the fastest: `naive` (one all-reduce for each parameter, after backward), `flat` (one for all of
them), `overlapped` (one for each parameter, during backward), `bucketed` (one for each bucket, during backward), and
PyTorch's own `ddp`.
"""

from __future__ import annotations

from impl.data_parallel.contract import DataParallelWrapper

# Implementations register in this order, simplest first, which is the order in every list and table.
# isort: off
from impl.data_parallel.naive import NaiveDataParallel
from impl.data_parallel.flat import FlatDataParallel
from impl.data_parallel.overlapped import OverlappedDataParallel
from impl.data_parallel.bucketed import BucketedDataParallel
from impl.data_parallel.library import TorchDataParallel
# isort: on

__all__ = [
    "BucketedDataParallel",
    "DataParallelWrapper",
    "FlatDataParallel",
    "NaiveDataParallel",
    "OverlappedDataParallel",
    "TorchDataParallel",
]
