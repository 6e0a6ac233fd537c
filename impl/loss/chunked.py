"""The loss in chunks of tokens, of which backward recomputes the logits: one chunk of logits is in memory at a time.

Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016) of eager's formula. It
computes four matrix products where eager computes three. In half precision autograd sums the chunks' gradients in half
precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from impl.loss.accounting import chunk_tokens, chunked_peak
from impl.loss.contract import check_inputs, product_dtype, statistics_dtype
from impl.loss.eager import summed_loss
from shardmark.api import Race, register


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of hidden weightᵀ. Shapes, dtypes and errors: `impl.loss.Loss`."""
    check_inputs(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
    product = product_dtype(hidden, weight)
    rows = chunk_tokens(hidden.shape[0], hidden.shape[1], product.itemsize)
    total = torch.zeros((), dtype=statistics_dtype(product), device=hidden.device)
    for chunk, chunk_targets in zip(hidden.split(rows), targets.split(rows), strict=True):
        arguments = chunk, weight, chunk_targets, ignore_index, label_smoothing, z_loss
        total = total + checkpoint(summed_loss, *arguments, use_reentrant=False, preserve_rng_state=False)
    return total / (targets != ignore_index).sum().clamp(min=1)


register(
    "loss", "chunked", chunked_loss, memory=chunked_peak, time=Race("eager"), called="the loss in chunks of tokens"
)
