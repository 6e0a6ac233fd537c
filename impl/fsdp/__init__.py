"""Fully sharded data parallelism: every rank keeps a part of each parameter, and gathers the whole where it computes.

    model = FullyShardedDataParallel(model, wrap=by_type(Block, nn.Embedding, nn.Linear))
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Our own, from the simplest: nothing gathered ahead (the reference), one unit ahead, kept after forward; `simple`, where
reading a parameter gathers it. PyTorch's two, `fsdp1` and `fsdp2`; and the latter as `accelerate` applies it.
"""

from __future__ import annotations

from impl.fsdp.contract import FullySharded

# They register in this order, as every list and table has them.
# isort: off
from impl.fsdp.sharded import FullyShardedDataParallel
from impl.fsdp.simple import SimpleFullyShardedDataParallel
from impl.fsdp.library import TorchFSDP1, TorchFSDP2
from impl.fsdp.accelerated import AcceleratedFSDP2
from impl.fsdp.wrapping import by_size, by_type, whole
# isort: on

__all__ = [
    "AcceleratedFSDP2",
    "FullySharded",
    "FullyShardedDataParallel",
    "SimpleFullyShardedDataParallel",
    "TorchFSDP1",
    "TorchFSDP2",
    "by_size",
    "by_type",
    "whole",
]
