"""The model and mesh that answers on scaling are about, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from impl.accounting.feed_forward import FeedForwards
from impl.accounting.mesh import Mesh

GB = 10**9
MODEL = FeedForwards(blocks=126, dim=16_384, ffn_dim=53_248)
MESH = Mesh(fsdp=16, tensor=4, flops=4.6e14, bandwidth=2e10 * 9, fsdp_axes=2, tensor_axes=1)


def least(hides: Callable[[float], bool], most: float = 1e9) -> float:
    """The least number that hides, by bisection; `most` where none below does."""
    low, high = 0.0, most
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes that autograd saves for backward, without weights; each tensor counts once."""
    weights, kept = {id(weight) for weight in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights and not any(tensor._base is weight for weight in model.parameters()):
            kept[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad
    return sum(tensor.nbytes for tensor in kept.values())
