"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019).

from impl.optim import AdamW, FusedAdamW

optimizer = AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
optimizer = FusedAdamW(model.parameters(), lr=3e-4, master_weights=True)
"""

from __future__ import annotations

from impl.interpreting import NO_TRITON, requires_triton
from impl.optim.contract import Optimizer
from shardmark.api import register

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.optim.adamw import AdamW
# isort: on

if NO_TRITON is None:
    from impl.optim.fused_adamw import FusedAdamW
else:
    register("optimizer", "fused_triton", None, requires=(requires_triton,), called="the fused AdamW in Triton")

from impl.optim.library import TorchForeach, TorchForLoop, TorchFused

__all__ = ["AdamW", "FusedAdamW", "Optimizer", "TorchForLoop", "TorchForeach", "TorchFused"]
