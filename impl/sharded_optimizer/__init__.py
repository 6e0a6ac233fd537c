"""Sharded optimizers: each rank keeps the state of a part of the parameters, and updates that part (ZeRO-1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, average_gradients=True, module=model)
    loss(model(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()

`unsharded` is the optimizer itself on every rank, `zero_redundancy` PyTorch's own, and `sharded` ours.
"""

from __future__ import annotations

from impl.sharded_optimizer.contract import ShardedOptimizerContract

# They register in this order, the reference first, as every list and table has them.
# isort: off
from impl.sharded_optimizer.library import unsharded, zero_redundancy
from impl.sharded_optimizer.sharded import ShardedOptimizer
# isort: on

__all__ = ["ShardedOptimizer", "ShardedOptimizerContract", "unsharded", "zero_redundancy"]
