"""The loss by the formula, with all logits in memory: the reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from impl.loss.accounting import eager_peak
from impl.loss.contract import check_inputs, statistics_dtype
from shardmark.api import register


def eager_loss(
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
    count = (targets != ignore_index).sum().clamp(min=1)
    return summed_loss(hidden, weight, targets, ignore_index, label_smoothing, z_loss) / count


def summed_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the sum of the losses over targets; the loss is their mean."""
    logits = linear(hidden, weight)  # (tokens, vocab)
    logits = logits.to(statistics_dtype(logits.dtype))
    loss = cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    if z_loss:
        squares = logits.logsumexp(-1).square()
        loss = loss + z_loss * squares.masked_fill(targets == ignore_index, 0).sum()
    return loss


register("loss", "eager", eager_loss, memory=eager_peak, called="the loss over all logits at once")
