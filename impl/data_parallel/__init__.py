"""Data parallelism: every rank holds the whole module, computes on its own share of the batch, and averages gradients.

    model = BucketedDataParallel(model, bucket_mb=25)
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

or, with the bucketed wrapper, `model.finish_gradient_synchronization(optimizer)`, which updates the parameters of each
bucket while those after it are on their way.

From the simplest to the fastest: `naive` (one all-reduce a parameter, after backward), `flat` (one for all of them),
`overlapped` (one a parameter, during backward), `bucketed` (one a bucket, during backward), and PyTorch's own `ddp`.
"""

from __future__ import annotations

from impl.data_parallel.contract import DataParallelWrapper

# They register in this order, simplest first, as every list and table has them.
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
