"""Shared by ways of clipping: which gradients there are, sums that are still to be made, and the scaling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def check_norm_type(norm_type: float) -> None:
    """ValueError for what is no norm."""
    if not norm_type >= 1:
        raise ValueError(f"a norm is of type 1 or more, or infinity, not {norm_type}")


def whole_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that there are, in which no sum over ranks is still to be made: they are made and kept."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = whole_placements(parameter.grad)
            found.append(parameter.grad)
    return found


def whole_placements(gradient: Tensor) -> Tensor:
    """The gradient with sums over ranks that are still to be made, made."""
    if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
        return gradient.redistribute(
            placements=[Replicate() if each.is_partial() else each for each in gradient.placements]
        )
    return gradient


@torch.no_grad()
def scale_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if local:
        torch._foreach_mul_(local, scale.to(local[0].device))
