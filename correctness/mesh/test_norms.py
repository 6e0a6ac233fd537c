"""The norm of all gradients on a mesh counts each parameter once."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from impl.mesh import clip_, gathered_norm, total_norm
from shardmark.api import Mesh
from shardmark.plugin import WorldsBySize

PLACEMENTS: tuple[tuple[Placement, ...], ...] = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
)
NORM_TYPES = (1.0, 2.0, 3.5, math.inf)


def _wholes(dtype: torch.dtype) -> list[Tensor]:
    """One for each placement, of which some ranks have no part, and one more."""
    random = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (7, 2), (2, 5), (6, 8), (3, 1), (4,))
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def _gradients(mesh: Mesh, dtype: torch.dtype) -> list[Tensor]:
    wholes, on = _wholes(dtype), mesh.device_mesh("cpu")
    placed = [distribute_tensor(x, on, each) for x, each in zip(wholes, PLACEMENTS, strict=False)]
    alone = distribute_tensor(wholes[-1], on[mesh.axes[1][0]], [Shard(0)])
    return [*placed[1:], alone, wholes[0]]


def norms_on_rank(mesh: Mesh, dtype: torch.dtype) -> tuple[list[float], list[float], int]:
    """Norms of each type by one number an axis, and of whole gradients; and how many all-reduces the last one took."""
    gradients = _gradients(mesh, dtype)
    gathered = [gathered_norm(gradients, norm_type).item() for norm_type in NORM_TYPES]
    sent: list[int] = []
    own = dist.all_reduce

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        sent.append(tensor.numel())
        return own(tensor, *args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counted
    try:
        found = [total_norm(gradients, norm_type).item() for norm_type in NORM_TYPES]
    finally:
        dist.all_reduce = own
    return found, gathered, len(sent) // len(NORM_TYPES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.meshes("dp=2,tp=2", "shard=3,tp=2", "dp=1,shard=2")
def test_each_parameter_counts_once(mesh: Mesh, dtype: torch.dtype, worlds: WorldsBySize) -> None:
    """With any placement, in every norm, and with parts that are empty: as that of the whole gradients."""
    flat = torch.cat([x.double().flatten() for x in _wholes(dtype)])
    right = [torch.linalg.vector_norm(flat, norm_type).item() for norm_type in NORM_TYPES]
    ranks = worlds(mesh.size).run(norms_on_rank, mesh, dtype)
    axes = sum(size > 1 for _, size in mesh.axes)
    for found, gathered, all_reduces in ranks:
        assert found == pytest.approx(right, rel=1e-12 if dtype == torch.float64 else 1e-6)
        assert gathered == pytest.approx(right, rel=1e-12 if dtype == torch.float64 else 1e-2)
        assert all_reduces == axes  # one for each axis of several ranks, whatever the sets of axes
        assert found == ranks[0][0]  # to the bit, or ranks would scale alike parameters otherwise


def clip_on_rank(mesh: Mesh) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients clipped by ours to a norm that is smaller, to one that is larger, and by PyTorch's own to the first."""
    on = mesh.device_mesh("cpu")
    results = []
    for max_norm in (0.5, 1e6):
        gradients = _gradients(mesh, torch.float64)
        clip_(gradients, total_norm(gradients), max_norm)
        results.append([g.full_tensor() if isinstance(g, DTensor) else g for g in gradients])
    parameters = []
    for gradient in _gradients(mesh, torch.float64)[:-2]:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    nn.utils.clip_grad_norm_(parameters, 0.5)
    alone = _gradients(mesh, torch.float64)[:-2]
    clip_(alone, total_norm(alone), 0.5)
    apart = [(p.grad - g).full_tensor() for p, g in zip(parameters, alone, strict=True)]  # type: ignore[union-attr, operator]
    partial = DTensor.from_local(torch.ones(2), on, [Partial(), Replicate()])
    assert total_norm([partial]).item() == pytest.approx(mesh.axes[0][1] * math.sqrt(2))
    return results[0], results[1], apart


@pytest.mark.meshes("dp=2,tp=2")
def test_clipping_scales_to_the_norm_and_no_further(mesh: Mesh, worlds: WorldsBySize) -> None:
    """As `torch.nn.utils.clip_grad_norm_` on the one mesh that it takes."""
    for small, large, apart in worlds(mesh.size).run(clip_on_rank, mesh):
        assert torch.cat([x.flatten() for x in small]).norm().item() == pytest.approx(0.5, rel=1e-5)
        own = _wholes(torch.float64)
        assert all(torch.equal(a, b) for a, b in zip(large, [*own[1:5], own[5], own[0]], strict=True))
        assert all(not x.abs().gt(1e-15).any() for x in apart)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, 0.5, math.nan])
def test_what_is_no_norm_is_an_error(norm_type: float) -> None:
    for norm in (total_norm, gathered_norm):
        with pytest.raises(ValueError, match=f"type 1 or more, or infinity, not {norm_type}"):
            norm([torch.ones(2)], norm_type)
    assert total_norm([]).item() == gathered_norm([]).item() == 0.0
