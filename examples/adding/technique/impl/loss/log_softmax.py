"""The cross entropy in two calls: the log-softmax of the logits, and the negative log-likelihood of the targets."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, log_softmax, nll_loss

from impl.loss.accounting import eager_peak
from impl.loss.contract import check_inputs, statistics_dtype
from shardmark.api import Race, Unsupported, register


def log_softmax_loss(
    hidden: Tensor,  # (tokens, dim)
    weight: Tensor,  # (vocab, dim)
    targets: Tensor,  # (tokens,)
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The mean over targets, a scalar. Errors: `impl.loss.Loss`; Unsupported with label smoothing or z-loss."""
    check_inputs(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
    if label_smoothing or z_loss:
        raise Unsupported("it has neither label smoothing nor z-loss")
    logits = linear(hidden, weight)  # (tokens, vocab)
    likelihoods = log_softmax(logits, dim=-1, dtype=statistics_dtype(logits.dtype))  # (tokens, vocab)
    count = (targets != ignore_index).sum().clamp(min=1)
    return nll_loss(likelihoods, targets, ignore_index=ignore_index, reduction="sum") / count


register("loss", "log_softmax", log_softmax_loss, memory=eager_peak, time=Race("eager"))
