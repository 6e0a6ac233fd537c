"""Stages inside of data parallelism, FSDP2 and tensor parallelism, beside one process with all groups' batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from correctness.pipeline.stages import build, loss, micro_batches, passed
from correctness.pipeline.training import Trained, named
from impl.data_parallel import BucketedDataParallel
from impl.distributed import full
from impl.mesh.trainer import without_wrappers
from shardmark.api import Implementation, Mesh

COUNT, STEPS = 4, 2
"""Micro-batches of a step, and steps, whose gradients accumulate."""

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def _ddp(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage, process_group=mesh.get_group("dp"))


def _bucketed(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return BucketedDataParallel(stage, process_group=mesh.get_group("dp"))


def _root(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(stage, mesh=mesh["shard"])


def _nested(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in (stage.inner, stage.outer):
        fully_shard(module, mesh=mesh["shard"])
    return fully_shard(stage, mesh=mesh["shard"])


def _layers_alone(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The stage itself is not wrapped."""
    for module in stage.children():
        fully_shard(module, mesh=mesh["shard"])
    return stage


def _tensor(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(stage, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})


WRAPS: dict[str, tuple[str, Wrap]] = {
    "ddp": ("pp=2,dp=2", _ddp),
    "bucketed": ("pp=2,dp=2", _bucketed),
    "fully_shard_root": ("pp=2,shard=2", _root),
    "fully_shard_nested": ("pp=2,shard=2", _nested),
    "fully_shard_layers_alone": ("pp=2,shard=2", _layers_alone),
    "tensor": ("pp=2,tp=2", _tensor),
}
"""The mesh, and how a stage is wrapped."""


def _wrapped(wrap: Wrap, mesh: DeviceMesh, device: str, kind: str, stage: int, stages: int) -> nn.Module:
    return wrap(build(kind, device, stage, stages), mesh)


def train_on_rank(implementation: Implementation, name: str, kind: str, device: str) -> Trained:
    spec, wrap = WRAPS[name]
    mesh = Mesh.parse(spec)
    on = mesh.device_mesh(torch.device(device).type)
    pipeline = implementation.watched(
        partial(_wrapped, wrap, on, device, kind), on.get_group("pp"), COUNT, loss=loss, unequal=False
    )
    trained = Trained(0)
    group = mesh.row_group(dist.get_rank())
    for step in range(STEPS):
        trained.losses.append(float(pipeline.step(*micro_batches(COUNT, 10 * step + group, device, True))))
    for where, parameter in named(pipeline.modules).items():
        found = parameter.grad
        if found is not None:
            trained.gradients[without_wrappers(where)] = full(found).cpu()
        trained.parameters[without_wrappers(where)] = full(parameter.detach()).cpu()
    return trained


@cache
def in_one_process(kind: str, stages: int, groups: int, own: int) -> Trained:
    """The losses of that group, and the mean of all groups' gradients."""
    modules = {stage: build(kind, "cpu", stage, stages) for stage in range(stages)}
    losses: list[float] = []
    for step in range(STEPS):
        for group in range(groups):
            inputs, targets = micro_batches(COUNT, 10 * step + group, "cpu", True)
            each: list[Tensor] = [
                loss(passed(list(modules.values()), x), y) for x, y in zip(inputs, targets, strict=True)
            ]
            total: Any = sum(each)
            (total / groups).backward()
            losses += [total.item()] if group == own else []
    parameters = named(modules)
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return Trained(stages, losses, gradients, {name: p.detach() for name, p in parameters.items()})
