"""The norm of all gradients of a mesh, and clipping by it: each parameter counts once, whatever the axes.

    norm = total_norm([p.grad for p in parameters], 2.0)
    clip_(gradients, norm, max_norm=1.0)

A gradient is a DTensor or a whole tensor that every rank has. `torch.nn.utils.clip_grad_norm_` refuses gradients on
several meshes, and so the ones of many models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from impl.distributed import full

Group = dist.ProcessGroup


def check_norm_type(norm_type: float) -> None:
    """ValueError for what is no norm."""
    if not norm_type >= 1:
        raise ValueError(f"a norm is of type 1 or more, or infinity, not {norm_type}")


@torch.no_grad()
def gathered_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, each gathered whole on every rank: what is right, in as many bytes as the model."""
    check_norm_type(norm_type)
    whole = [full(g).flatten() for g in gradients]
    return torch.linalg.vector_norm(torch.cat(whole), norm_type) if whole else torch.zeros(())


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
        dist.all_reduce(sums, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        parts = torch.where(of_axis, sums, parts)
    return parts.max() if largest else parts.sum() ** (1 / norm_type)


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if local:
        torch._foreach_mul_(local, scale.to(local[0].device))


def whole_placements(gradient: Tensor) -> Tensor:
    """The gradient with sums over ranks that are still to be made, made."""
    if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
        return gradient.redistribute(
            placements=[Replicate() if each.is_partial() else each for each in gradient.placements]
        )
    return gradient


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
    dtype = torch.promote_types(shards[0].dtype, torch.float32)
    if not full:
        return torch.zeros((), dtype=dtype, device=shards[0].device)
    norms = torch.stack([torch.linalg.vector_norm(each, norm_type, dtype=dtype) for each in full])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
