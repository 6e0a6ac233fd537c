"""Clipping the gradients of a language model on a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from impl.clipping.accounting import local_shape
from impl.clipping.cases import ClippingCase
from impl.model.sizes import SIZES
from impl.optim.accounting import shapes
from shardmark.api import Implementation, Mark, Mesh

MAX_NORM = 1.0


class ClippingStep:
    """Clip random gradients, whose norm is far above MAX_NORM the first time, and MAX_NORM from then on."""

    def __init__(self, implementation: Implementation, case: ClippingCase, device: str) -> None:
        self.backend = dist.get_backend()
        self.clip = implementation.adapted
        self.parameters = [*_parameters(case, device)]

    def prepare(self) -> None:
        """Nothing to reset: what is done does not depend on the norm."""

    def step(self, mark: Mark) -> None:
        """Clip."""
        self.clip(self.parameters, MAX_NORM)


def _parameters(case: ClippingCase, device: str) -> Iterator[nn.Parameter]:
    mesh = Mesh.parse(case.mesh)
    whole = mesh.device_mesh(torch.device(device).type)
    names = [name for name, _ in mesh.axes]
    for shape in shapes(SIZES[case.model]):
        alone = case.several_meshes and len(shape) == 1
        on = whole["shard"] if alone else whole
        placements = [_placement(name, shape) for name in (["shard"] if alone else names)]
        local = torch.empty(local_shape(shape, mesh), device=device, dtype=getattr(torch, case.dtype))
        yield _placed(local, on, placements, shape)


def _placement(axis: str, shape: tuple[int, ...]) -> Placement:
    if axis == "shard":
        return Shard(0)
    return Shard(1) if axis == "tp" and len(shape) == 2 else Replicate()


def _placed(local: Tensor, on: object, placements: list[Placement], shape: tuple[int, ...]) -> nn.Parameter:
    stride = torch.empty(shape, device="meta").stride()
    options = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    parameter = nn.Parameter(DTensor.from_local(local.normal_(std=0.02), on, placements, **options))  # type: ignore[arg-type]
    parameter.grad = DTensor.from_local(torch.empty_like(local).normal_(), on, placements, **options)  # type: ignore[arg-type]
    return parameter
