"""Loss: the cross entropy of a language model's next token, with the output projection.

from impl.loss import eager_loss, fused_loss_pytorch

loss = eager_loss(hidden, weight, targets)
loss = fused_loss_pytorch(hidden, weight, targets, label_smoothing=0.1, z_loss=1e-4)
"""

from __future__ import annotations

from impl.interpreting import NO_TRITON, requires_triton
from impl.loss.contract import Loss, check_inputs, product_dtype, statistics_dtype
from shardmark.api import register

# Implementations register in this order, simplest first, which is the order in every list and table.
# isort: off
from impl.loss.eager import eager_loss
from impl.loss.chunked import chunked_loss
from impl.loss.fused_pytorch import fused_loss_pytorch
# isort: on

if NO_TRITON is None:
    from impl.loss.fused_triton import fused_loss_triton
else:
    register("loss", "fused_triton", None, requires=(requires_triton,), called="the fused loss in Triton")

from impl.loss.library import compiled_loss, linear_cross_entropy

__all__ = [
    "Loss",
    "check_inputs",
    "chunked_loss",
    "compiled_loss",
    "eager_loss",
    "fused_loss_pytorch",
    "fused_loss_triton",
    "linear_cross_entropy",
    "product_dtype",
    "statistics_dtype",
]
