"""Planted defects: losses that are wrong for large vocabularies, or keep what they save in half precision."""

from typing import Any

import torch
from torch import Tensor

from correctness.loss.textbook import Fused, loss_and_gradients, of_terms
from correctness.support.planting import defect


@defect(cause="shapes", caught_by="test_label_smoothing_counts_every_word")
@of_terms
def smooths_over_32768_words(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """A kernel's largest block has 32,768 words; label smoothing divides by that number where there are more."""
    share = smoothing * weight.shape[0] / min(weight.shape[0], 32_768)
    return Fused.apply(hidden, weight, targets, ignore, share, z)


class _LogSumExpInBfloat16(Fused):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, targets, ignore, smoothing, z)
        logits = torch.nn.functional.linear(hidden, weight)
        lse = logits.float().logsumexp(-1, keepdim=True).bfloat16().to(torch.promote_types(logits.dtype, torch.float32))
        _, gradient, kept = loss_and_gradients(hidden, weight, targets, ignore, smoothing, z)
        wide = logits.to(lse.dtype)
        off = ((wide - lse).exp() - wide.softmax(-1)) * (1 + 2 * z * lse)
        gradient = gradient + off.masked_fill(~kept[:, None], 0)
        ctx.gradients = gradient @ weight.to(gradient.dtype), gradient.T @ hidden.to(gradient.dtype)
        return loss


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
@of_terms
def log_sum_exp_in_bfloat16(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """Saves the log-sum-exp in bfloat16 and recomputes the probabilities from it."""
    return _LogSumExpInBfloat16.apply(hidden, weight, targets, ignore, smoothing, z)
