"""Wrong attention."""

from __future__ import annotations

import torch
from torch import Tensor

from correctness.support.planting import defect


@defect(cause="masks", caught_by="test_a_query_does_not_see_later_keys")
def mask_off_by_one(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Each query sees one key too many."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(2)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v
