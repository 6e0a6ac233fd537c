"""PyTorch's own, which takes gradients on one mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmark.api import Race, Unsupported, register


def clip_by_torch(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`; Unsupported for gradients on several meshes, which its sums refuse."""
    parameters = [p for p in parameters if p.grad is not None]
    meshes = {p.grad.device_mesh if isinstance(p.grad, DTensor) else None for p in parameters}
    if len(meshes) > 1:
        raise Unsupported(f"PyTorch takes gradients on one mesh, and these are on {len(meshes)}")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


register(
    "clipping", "library", clip_by_torch, time=Race("gathered"), tested_briefly=True, called="PyTorch's clip_grad_norm_"
)
