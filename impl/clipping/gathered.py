"""Gather every gradient: what is right, in as many bytes as the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from impl.clipping.base import check_norm_type, scale_, whole_gradients
from impl.distributed import full
from shardmark.api import register


@torch.no_grad()
def gathered_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, each gathered whole on every rank, at least in float32."""
    check_norm_type(norm_type)
    whole = [full(g).flatten() for g in gradients]
    if not whole:
        return torch.zeros(())
    together = torch.cat(whole)
    return torch.linalg.vector_norm(together, norm_type, dtype=torch.promote_types(together.dtype, torch.float32))


def clip_gathered(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """See `impl.clipping.Clip`."""
    gradients = whole_gradients(parameters)
    norm = gathered_norm(gradients, norm_type)
    scale_(gradients, norm, max_norm)
    return norm


register("clipping", "gathered", clip_gathered, called="the norm of gathered gradients")
