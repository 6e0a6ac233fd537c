"""Models whose parameters are DTensors, PyTorch's and ours: the whole of each, and the norm of all gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gather_full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by each of its names. All ranks call."""
    full = {parameter: _whole(parameter.detach()) for parameter in model.parameters()}
    return {name: full[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; the norm that they had. All ranks call.

    Right however parameters are placed: `torch.nn.utils.clip_grad_norm_` knows DTensors, and gives one back.
    """
    return _whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
