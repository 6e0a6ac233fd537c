"""Right attention, in unusual ways."""

from __future__ import annotations

import torch
from torch import Tensor

from correctness.support.planting import right
from impl.attention import check_inputs


@right("float64 inside")
def float64_einsum(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    if group > 1:
        wide_k, wide_v = (x.repeat_interleave(group, dim=-3) for x in (wide_k, wide_v))
    scores = torch.einsum("...qd,...kd->...qk", wide_q, wide_k) / q.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("...qk,...kd->...qd", scores.softmax(-1), wide_v).to(q.dtype)
