"""Right ways to clip on a mesh that work in unusual ways: the tests must accept them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from correctness.clipping.gradients import wide
from correctness.clipping.wrong import ByEach
from correctness.support.planting import right
from impl.clipping import gathered_norm, whole_gradients


@right("each gradient by itself, in float64, with an all-reduce of its own for each axis")
class OneAtATime(ByEach):
    pass


@right("copies count a share each, and one all-reduce over the world adds all of them up")
def clip_by_shares(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    gradients, total = whole_gradients(parameters), torch.zeros((), dtype=torch.float64)
    largest = math.isinf(norm_type)
    for gradient in gradients:
        local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).abs().double()
        copies = dist.get_world_size()
        if isinstance(gradient, DTensor):
            for dim, each in enumerate(gradient.placements):
                copies //= 1 if isinstance(each, Replicate) else gradient.device_mesh.size(dim)
        if largest:
            total = torch.cat([total[None], local.flatten()]).max().nan_to_num(math.inf, math.inf)
        else:
            total = total + local.pow(norm_type).sum() / copies
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norm = total if largest else total ** (1 / norm_type)
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
    return norm


@right("the whole gradients, and new ones in place of the old; the norm is a DTensor")
def clip_into_new_ones(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    kept = [p for p in parameters if p.grad is not None]
    whole_gradients(kept)
    norm = gathered_norm([wide(p.grad) for p in kept if p.grad is not None], norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    if scale < 1:
        for p in kept:
            p.grad = p.grad * scale  # type: ignore[operator]
    mesh = next((p.grad.device_mesh for p in kept if isinstance(p.grad, DTensor)), None)
    return norm if mesh is None else DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
