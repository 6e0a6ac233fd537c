"""A decoder cut over tensor parallel ranks, with the sequence cut between its products, as KempnerForge cuts it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SEQUENCE = Shard(1)


def cut(model: Any, mesh: DeviceMesh) -> None:
    """Cut a decoder's blocks, its last norm and its output over the mesh's ranks. Its embedding and the logits are
    whole on each of them."""
    model.embedding.register_forward_hook(partial(_placed, mesh, Replicate()))
    for block in model.blocks:
        parallelize_module(block, mesh, _plan())
        for part in (block.attention, block.feed_forward):
            part.register_forward_hook(partial(_placed, mesh, SEQUENCE))
    output = ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate())
    parallelize_module(model, mesh, {"norm": SequenceParallel(), "output": output})


def _plan() -> dict[str, ParallelStyle]:
    columns, rows = ColwiseParallel(input_layouts=SEQUENCE), RowwiseParallel(output_layouts=SEQUENCE)
    return {
        **dict.fromkeys(("norm_1", "norm_2"), SequenceParallel()),
        **dict.fromkeys((f"attention.{name}" for name in ("query", "key", "value")), columns),
        **dict.fromkeys((f"feed_forward.{name}" for name in ("gate", "up")), columns),
        **dict.fromkeys(("attention.output", "feed_forward.down"), rows),
    }


def _placed(mesh: DeviceMesh, placement: Placement, module: nn.Module, args: Any, result: Tensor) -> Tensor:
    """The result as a DTensor; one that a view has made local is one again."""
    return result if isinstance(result, DTensor) else DTensor.from_local(result, mesh, [placement])


def clip_each_mesh(model: nn.Module) -> None:
    """Clip gradients to a global norm of 1, summed over the meshes on which they are."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter.grad)
    total = torch.zeros(())
    for gradients in by_mesh.values():
        squares = torch.stack([gradient.norm(2.0) for gradient in gradients]).square().sum()
        total = total + (squares.full_tensor() if isinstance(squares, DTensor) else squares)
    scale = torch.clamp(1.0 / (total.sqrt() + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        for gradient in gradients:
            gradient.mul_(scale)
