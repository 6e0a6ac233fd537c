"""The fused loss in PyTorch operators: a chunk's logits become their gradients in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.loss.accounting import fused_pytorch_peak
from impl.loss.fused import Terms, fused_loss
from shardmark.api import Race, register


def fused_loss_pytorch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of hidden weightᵀ. Shapes, dtypes and errors: `impl.loss.Loss`. No double backward."""
    return fused_loss(to_gradients, hidden, weight, targets, Terms(ignore_index, label_smoothing, z_loss))


def to_gradients(logits: Tensor, targets: Tensor, terms: Terms, needs_gradients: bool) -> Tensor:
    """The sum of the rows' losses; the logits become its gradients. See `impl.loss.fused.ToGradients`.

    A row's loss is -(1 - s) y_target - s mean(y) + z lse², with y the log-softmax of its logits, lse their logsumexp, s
    the label smoothing and z the z-loss. So its gradient is (1 + 2 z lse) exp(y) - (1 - s) onehot(target) - s / vocab.
    lse - x_target, in place of -y_target, would cancel: an offset that all logits share would cost its digits.
    """
    smoothing, vocab = terms.label_smoothing, logits.shape[1]
    counted = targets != terms.ignore_index
    at = torch.where(counted, targets, 0)[:, None]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the logits themselves, or a copy
    lse = x.gather(1, at)[:, 0] if terms.z_loss else None
    torch.log_softmax(x, 1, out=x)
    losses = x.gather(1, at)[:, 0]
    if lse is not None:
        lse -= losses
    losses *= smoothing - 1
    if smoothing:
        losses -= smoothing * x.mean(1)
    if lse is not None:
        losses += terms.z_loss * lse.square()
    if needs_gradients:
        torch.exp(x, out=x)
        if lse is not None:
            x *= (1 + 2 * terms.z_loss * lse)[:, None]
        if smoothing:
            x -= smoothing / vocab
        x.scatter_(1, at, x.gather(1, at).sub_(1 - smoothing))
        if logits.is_cuda or not counted.all():  # on CUDA the host would wait for the answer
            x.masked_fill_(~counted[:, None], 0)
        if x is not logits:
            logits.copy_(x)
    return losses.masked_fill(~counted, 0).sum()


MANY_LOGITS = 2**23
"""With this many logits eager gets new memory pages from the system in every step, which costs time: glibc reuses only
blocks of up to 32 MiB."""


def _is_judged(case: Any, device: str) -> bool:
    return device == "cpu" and case.tokens * case.vocab >= MANY_LOGITS


register(
    "loss",
    "fused_pytorch",
    fused_loss_pytorch,
    memory=fused_pytorch_peak,
    time=Race("eager", budget=2.0, goal=1.0, applies=_is_judged),
    called="the fused loss in PyTorch",
)
