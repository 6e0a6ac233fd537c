"""Gradients on a mesh, with any placements, and what a clip makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from impl.distributed import full
from shardmark.api import Implementation, Mesh

PLACEMENTS: tuple[tuple[Placement, ...], ...] = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
)
SHAPES = ((5, 3), (7, 2), (2, 5), (6, 8), (3, 1))
"""One for each of PLACEMENTS; some ranks have no part of some."""
ALONE, WHOLE = (4,), (3, 2)
"""Shapes of a gradient on the last axis alone, and of one that is no DTensor."""


@dataclass
class Clipped:
    """One rank's norm, and the whole gradients after clipping."""

    norm: float
    gradients: list[Tensor]


def wholes(dtype: torch.dtype, several_meshes: bool, size: float = 1.0) -> list[Tensor]:
    """The same on every rank."""
    random = torch.Generator().manual_seed(0)
    shapes = [*SHAPES, *([ALONE, WHOLE] if several_meshes else [])]
    return [size * torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def placed(mesh: Mesh, gradients: Sequence[Tensor], device: str) -> list[nn.Parameter]:
    """Parameters of the mesh with those gradients, the first of PLACEMENTS, and one more without."""
    on = mesh.device_mesh(torch.device(device).type)
    dims = len(mesh.axes)
    found = []
    for whole, placements in zip(gradients, PLACEMENTS, strict=False):
        found.append(_with(distribute_tensor(whole.to(device), on, placements[:dims])))
    for whole in gradients[len(SHAPES) :]:
        alone = whole.shape == ALONE
        found.append(_with(distribute_tensor(whole.to(device), on[mesh.axes[-1][0]], [Shard(0)]) if alone else whole))
    return [*found, nn.Parameter(torch.ones(2, device=device))]


def _with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def with_sums_to_make(mesh: Mesh, device: str) -> nn.Parameter:
    """A gradient of ones whose sum over the first axis is still to be made."""
    on = mesh.device_mesh(torch.device(device).type)
    placements = [Partial(), *[Replicate()] * (len(mesh.axes) - 1)]
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, device=device), on, [Replicate()] * len(mesh.axes)))
    parameter.grad = DTensor.from_local(torch.ones(2, device=device), on, placements)
    return parameter


def clip_on_rank(
    implementation: Implementation,
    mesh: Mesh,
    gradients: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    device: str,
) -> Clipped:
    parameters = placed(mesh, gradients, device)
    norm = full(implementation.watched(parameters, max_norm, norm_type))
    return Clipped(norm.item(), [full(p.grad).cpu() for p in parameters if p.grad is not None])


def norms_on_rank(
    implementation: Implementation, mesh: Mesh, several_meshes: bool, value: float, norm_type: float, device: str
) -> list[float]:
    """The norm where one number of a gradient is that value, for each gradient."""
    found = []
    for index in range(len(wholes(torch.float64, several_meshes))):
        gradients = wholes(torch.float64, several_meshes)
        gradients[index].view(-1)[-1] = value
        found.append(clip_on_rank(implementation, mesh, gradients, 1.0, norm_type, device).norm)
    return found


def clip_an_iterator_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> Clipped:
    parameters = placed(mesh, wholes(torch.float64, False), device)
    norm = full(implementation.adapted(iter(parameters), 0.5, 2.0))
    return Clipped(norm.item(), [full(p.grad).cpu() for p in parameters if p.grad is not None])


def clip_sums_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> Clipped:
    parameter = with_sums_to_make(mesh, device)
    norm = full(implementation.watched([parameter], 1e6, 2.0))
    assert parameter.grad is not None
    return Clipped(norm.item(), [full(parameter.grad).cpu()])


def clip_nothing_on_rank(implementation: Implementation) -> float:
    return full(implementation.watched([nn.Parameter(torch.ones(2))], 1.0, 2.0)).item()


def differences(
    ranks: Sequence[Clipped], gradients: Sequence[Tensor], max_norm: float, norm_type: float, close: float | None = None
) -> Iterator[str]:
    """A line for each thing that is wrong: a norm by more than `close`, relative to its size, and a gradient by more
    than that, roundings in its own dtype, and a spacing of its subnormal numbers."""
    if close is None:
        close = 8 * torch.finfo(gradients[0].dtype).eps  # the norm of norms, a few roundings
    values = [wide(g).flatten() for g in gradients]
    right = torch.linalg.vector_norm(torch.cat(values), norm_type).item() if values else 0.0
    scale = min(1.0, max_norm / (right + 1e-6))

    def is_scaled(own: Tensor, whole: Tensor) -> bool:
        info, expected = torch.finfo(whole.dtype), scale * wide(whole)
        allowed = (close + 2 * info.eps) * expected.abs() + info.smallest_normal * info.eps
        return bool(((wide(own) - expected).abs() <= allowed).all())

    for rank, found in enumerate(ranks):
        if not abs(found.norm - right) <= close * right:
            yield f"the norm is {found.norm:.8g} on rank {rank}, and of whole gradients {right:.8g}"
        if found.norm != ranks[0].norm:
            yield f"the norm is {found.norm!r} on rank {rank}, and {ranks[0].norm!r} on rank 0"
        for index, (own, whole) in enumerate(zip(found.gradients, gradients, strict=True)):
            if own.shape != whole.shape:
                yield f"gradient {index} has the shape {tuple(own.shape)} on rank {rank}, and had {tuple(whole.shape)}"
            elif scale == 1.0 and not torch.equal(own, whole):
                yield f"gradient {index} has other bits on rank {rank}, and the norm is below {max_norm:g}"
            elif not is_scaled(own, whole):
                yield f"gradient {index} is not scaled by {scale:.6g} on rank {rank}"


def wide(x: Tensor) -> Tensor:
    """In double precision, complex numbers too."""
    return x.to(torch.promote_types(x.dtype, torch.float64))
