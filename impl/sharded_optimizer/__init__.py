"""Sharded optimizers (ZeRO-1): each rank has the optimizer state of a part of the parameters, and updates that part.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, average_gradients=True, module=model)
    loss(model(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()

`unsharded` is the optimizer itself on every rank (the reference), `zero_redundancy` is PyTorch's, `sharded` is ours.
"""

from __future__ import annotations

from impl.sharded_optimizer.contract import ShardedOptimizerContract

# Implementations register in this order, which is the order in every list and table.
# isort: off
from impl.sharded_optimizer.library import unsharded, zero_redundancy
from impl.sharded_optimizer.sharded import ShardedOptimizer
# isort: on

__all__ = ["ShardedOptimizer", "ShardedOptimizerContract", "unsharded", "zero_redundancy"]
