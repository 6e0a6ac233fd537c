"""The norm of gradients on a mesh with one all-reduce for each axis, of a few numbers.

    norm = total_norm([p.grad for p in parameters], 2.0)

`torch.nn.utils.clip_grad_norm_` refuses gradients on several meshes, and so those of many models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.clipping.accounting import by_axes_peak
from impl.clipping.base import check_norm_type, scale_, whole_gradients, whole_placements
from shardmark.api import Race, register

Group = dist.ProcessGroup


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, with one all-reduce for each axis along which any is sharded, of one number for each
    set of axes that some are sharded along. All ranks call; it is bitwise equal on all of them."""
    check_norm_type(norm_type)
    largest = math.isinf(norm_type)
    shards: dict[tuple[Group, ...], list[Tensor]] = {}
    for gradient in gradients:
        local, groups = _local(gradient)
        shards.setdefault(groups, []).append(local)
    if not shards:
        return torch.zeros(())
    parts = torch.stack([_power(each, norm_type) for each in shards.values()])
    for group in dict.fromkeys(group for groups in shards for group in groups):
        # Parts that are not sharded along this axis are the same on its ranks, and stay as they are.
        of_axis = torch.tensor([group in groups for groups in shards], device=parts.device)
        sums = torch.where(of_axis, parts, 0)
        if largest:  # the largest of numbers, by Gloo and by NCCL, may miss a NaN
            sums.nan_to_num_(nan=math.inf, posinf=math.inf)
        dist.all_reduce(sums, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        parts = torch.where(of_axis, sums, parts)
    return parts.max() if largest else parts.sum() ** (1 / norm_type)


def clip_by_axes(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """See `impl.clipping.Clip`."""
    gradients = whole_gradients(parameters)
    norm = total_norm(gradients, norm_type)
    scale_(gradients, norm, max_norm)
    return norm


def _local(gradient: Tensor) -> tuple[Tensor, tuple[Group, ...]]:
    """This rank's part, and the groups of the axes along which others have other parts."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    gradient = whole_placements(gradient)
    assert isinstance(gradient, DTensor)
    mesh = gradient.device_mesh
    dims = [dim for dim, each in enumerate(gradient.placements) if not each.is_replicate() and mesh.size(dim) > 1]
    return gradient.to_local(), tuple(mesh.get_group(dim) for dim in dims)


def _power(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    """The sum of the absolute values to the power of `norm_type`, at least in float32; of infinity, the largest."""
    full = [each for each in shards if each.numel()]
    dtype = reduce(torch.promote_types, (each.dtype for each in shards), torch.float32).to_real()
    if not full:
        return torch.zeros((), dtype=dtype, device=shards[0].device)
    norms = torch.stack([torch.linalg.vector_norm(each, norm_type, dtype=_as(each, dtype)) for each in full])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _as(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype, or the complex one of such parts."""
    return dtype.to_complex() if x.is_complex() else dtype


register(
    "clipping",
    "by_axes",
    clip_by_axes,
    memory=by_axes_peak,
    time=Race("library", budget=1.5, goal=1.05),
    called="the norm by axes",
)
