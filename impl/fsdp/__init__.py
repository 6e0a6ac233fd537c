"""Fully sharded data parallelism: every rank stores a shard of each parameter, and all-gathers it where it computes.

    model = FullyShardedDataParallel(model, wrap=by_type(Block, nn.Embedding, nn.Linear))
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Our own: `sharded_plain` without prefetch (the reference), `sharded` with a prefetch of one unit, `sharded_kept` with
`reshard_after_forward=False`, `sharded_norms_replicated` with norms and biases replicated; and `simple`, where
reading a parameter all-gathers it. PyTorch's: `fsdp1`, `fsdp2`, and the latter as Hugging Face's `accelerate` applies
it.
"""

from __future__ import annotations

from impl.fsdp.contract import FullySharded

# Implementations register in this order, which is the order in every list and table.
# isort: off
from impl.fsdp.sharded import FullyShardedDataParallel
from impl.fsdp.simple import SimpleFullyShardedDataParallel
from impl.fsdp.library import TorchFSDP1, TorchFSDP2
from impl.fsdp.accelerated import AcceleratedFSDP2
from impl.fsdp.wrapping import by_size, by_type, norms_and_biases, whole, with_blocks
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
    "norms_and_biases",
    "whole",
    "with_blocks",
]
