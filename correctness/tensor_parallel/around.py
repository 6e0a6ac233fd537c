"""The suite's own data parallelism, FSDP and ZeRO around its tensor parallelism, whose parameters are local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import SGD

from correctness.mesh.training import own_batches
from correctness.tensor_parallel.training import batches, model_of
from impl.data_parallel import BucketedDataParallel, TorchDataParallel
from impl.fsdp import FullyShardedDataParallel
from impl.mesh import token_losses
from impl.mesh.decoder import token_count
from impl.mesh.trainer import OwnNames
from impl.sharded_optimizer import ShardedOptimizer, zero_redundancy
from impl.tensor_parallel.placing import joined, localized
from shardmark.api import Implementation, Mesh

STEPS = 4
WITHIN = 1e-10
"""Relative to the largest value of a tensor, in float64, after some steps."""
OPTIONS = {"lr": 0.01, "momentum": 0.9}

Around = Callable[[nn.Module, dist.ProcessGroup], tuple[Any, Any]]
"""From the model and the group of ranks with rows of their own, the module to call and its optimizer."""


def _wrapped(wrapper: Callable[..., Any], model: nn.Module, group: dist.ProcessGroup) -> tuple[Any, Any]:
    made = wrapper(model, process_group=group)
    return made, SGD(made.parameters(), **OPTIONS)


def _by_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "feed_forward")]


def _sharded_optimizer(model: nn.Module, group: dist.ProcessGroup) -> tuple[Any, Any]:
    return model, ShardedOptimizer(model.parameters(), SGD, process_group=group, average_gradients=True, **OPTIONS)


def _zero_redundancy(model: nn.Module, group: dist.ProcessGroup) -> tuple[Any, Any]:
    made = TorchDataParallel(model, process_group=group)
    return made, zero_redundancy(made.parameters(), SGD, process_group=group, **OPTIONS)


AROUND: dict[str, Around] = {
    "ddp": partial(_wrapped, TorchDataParallel),
    "bucketed": partial(_wrapped, BucketedDataParallel),
    "sharded": partial(_wrapped, partial(FullyShardedDataParallel, wrap=_by_layers)),
    "sharded_optimizer": _sharded_optimizer,
    "zero_redundancy": _zero_redundancy,
}


@dataclass
class Trained:
    losses: list[float]
    parameters: dict[str, Tensor]
    """Whole, at the end."""


def train_on_rank(implementation: Implementation, mesh: Mesh, around: str, kind: str, device: str) -> Trained:
    """Train inside the wrapper, over the axis beside tp."""
    on = mesh.device_mesh(torch.device(device).type)
    model = implementation.watched(model_of(kind, device), on["tp"])
    placements = localized(model)
    own_names = OwnNames(model)
    group = on.get_group(0)
    called, optimizer = AROUND[around](model, group)
    losses = []
    for step in range(STEPS):
        own = own_batches(mesh, device, step, of=partial(batches, kind))
        tokens = sum(int(token_count(batch)) for batch in batches(kind, mesh.row_groups, step))
        loss = sum(called(*batch) for batch in own) / tokens
        (loss * group.size()).backward()
        total = loss.detach().clone()
        for each in (called, optimizer):
            if hasattr(each, "finish_gradient_synchronization"):
                each.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    gathers = getattr(called, "gather_full_parameters", None)
    local = gathers() if gathers else {name: p.detach() for name, p in model.named_parameters()}
    parameters = {}
    for name, part in local.items():
        parts: list[Any] = [None] * mesh.sizes["tp"]
        dist.all_gather_object(parts, part.cpu(), group=on.get_group("tp"))
        placement = placements[own_names[name]]
        parameters[own_names[name]] = joined(parts, placement) if isinstance(placement, Shard) else part.cpu()
    return Trained(losses, parameters)


@cache
def in_one_process(row_groups: int, kind: str) -> Trained:
    model = model_of(kind, "cpu")
    optimizer, losses = SGD(model.parameters(), **OPTIONS), []
    for step in range(STEPS):
        whole = batches(kind, row_groups, step)
        loss = sum(token_losses(model, batch) for batch in whole) / sum(token_count(batch) for batch in whole)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})


def complaints(ranks: Sequence[Trained], expected: Trained) -> Iterator[str]:
    for rank, found in enumerate(ranks):
        for step, (loss, right) in enumerate(zip(found.losses, expected.losses, strict=True)):
            if not abs(loss - right) <= WITHIN * abs(right):
                yield f"the loss of step {step} on rank {rank} is {loss:.8g}, not {right:.8g}"
        for name, right in expected.parameters.items():
            off = (found.parameters[name] - right).abs().max().item()
            if not off <= WITHIN * right.abs().max().item():
                yield f"{name} is off by {off:.3g} on rank {rank} after {STEPS} steps"
            if not found.parameters[name].equal(ranks[0].parameters[name]):
                yield f"{name} has other bits on rank {rank} than on rank 0"
