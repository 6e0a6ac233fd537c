"""Stages inside of data parallelism, FSDP2 and tensor parallelism, beside one process with all groups' batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def _mixed(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Compute in bfloat16, with weights, and gradients that are added up and reduced, in float32."""
    return fully_shard(
        stage.float(), mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    )


def _tensor(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(stage, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})


WRAPS: dict[str, tuple[str, Wrap]] = {
    "ddp": ("pp=2,dp=2", _ddp),
    "bucketed": ("pp=2,dp=2", _bucketed),
    "fully_shard_root": ("pp=2,shard=2", _root),
    "fully_shard_nested": ("pp=2,shard=2", _nested),
    "fully_shard_layers_alone": ("pp=2,shard=2", _layers_alone),
    "fully_shard_mixed": ("pp=2,shard=2", _mixed),
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
def in_one_process(name: str, kind: str, stages: int, own: int) -> Trained:
    """The losses of that rank's group, and the mean of all groups' gradients."""
    mesh = Mesh.parse(WRAPS[name][0])
    if WRAPS[name][1] is _mixed:
        return _in_bfloat16(kind, stages, mesh.row_groups, mesh.row_group(own))
    groups, own = mesh.row_groups, mesh.row_group(own)
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
    found = {name: p.detach() for name, p in parameters.items()}
    return Trained(stages, losses=losses, gradients=gradients, parameters=found)


def _in_bfloat16(kind: str, stages: int, groups: int, own: int) -> Trained:
    """Each micro-batch by a copy in bfloat16, whose gradients are added up in float32."""
    modules = {stage: build(kind, "cpu", stage, stages).float() for stage in range(stages)}
    parameters = {name: p.detach() for name, p in named(modules).items()}
    found = Trained(stages, within=1e-5, parameters=parameters)
    for step, group in product(range(STEPS), range(groups)):
        total = 0.0
        for x, y in zip(*micro_batches(COUNT, 10 * step + group, "cpu", True), strict=True):
            narrow = {stage: copy.deepcopy(module).bfloat16() for stage, module in modules.items()}
            one = loss(passed(list(narrow.values()), x), y)
            one.backward()
            total += one.item()
            for name, p in named(narrow).items():
                assert p.grad is not None
                found.gradients[name] = found.gradients.get(name, torch.zeros(())) + p.grad.float() / groups
        found.losses += [total] if group == own else []
    return found
