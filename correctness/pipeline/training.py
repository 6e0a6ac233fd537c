"""Training by a pipeline beside one process: losses, gradients and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from correctness.pipeline.stages import KINDS, Tied, build, builder, loss, micro_batches, passed
from correctness.support.batches import left_as_they_are
from shardmark.api import Implementation, Mesh, family

PYTORCHS = tuple(name for name in family("pipeline").implementations if name.startswith("torch_"))
LATER = 1000
"""Times as much as at the first step may later ones differ: roundings grow with steps, and with stages."""
OPTIONS = {"lr": 0.002, "momentum": 0.9}


@dataclass
class Trained:
    """Results of a rank, or of one process: each step's loss; by stage and name, gradients of the first step, and
    parameters and buffers after the last."""

    stages: int
    within: float = KINDS["plain"].within
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def named(modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{stage}.{name}": p for stage, module in modules.items() for name, p in module.named_parameters()}


def state_of(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {f"{stage}.{name}": each.detach() for stage, m in modules.items() for name, each in m.state_dict().items()}


def group_of(mesh: Mesh, device: str) -> dist.ProcessGroup:
    return mesh.device_mesh(torch.device(device).type).get_group("pp")


def train_on_rank(
    implementation: Implementation, mesh: Mesh, kind: str, count: int, device: str, steps: int, equal: bool
) -> Trained:
    group = group_of(mesh, device)
    pipeline = implementation.watched(builder(kind, device), group, count, loss=loss, unequal=not equal)
    parameters = named(pipeline.modules)
    every_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(every_rank, max(pipeline.modules), group=group)
    trained = Trained(max(every_rank) + 1)
    optimizer = SGD([p for p in parameters.values() if p.requires_grad] or [nn.Parameter(torch.zeros(1))], **OPTIONS)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        given = micro_batches(count, step, device, equal, kind)
        with left_as_they_are(given):
            losses.append(pipeline.step(*given))
        if kind == "tied":
            _share_tied(pipeline.modules, trained.stages, group)
        if step == 0:
            trained.gradients = {name: p.grad.cpu().clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
    trained.losses = [float(each) for each in losses]  # read late, as training logs them only now and then
    trained.parameters = {name: each.cpu() for name, each in state_of(pipeline.modules).items()}
    return trained


def _share_tied(modules: Mapping[int, nn.Module], stages: int, group: dist.ProcessGroup) -> None:
    """Add the gradients of both copies of the embedding, as one that trains a pipeline does."""
    both = [modules[0].embedding.weight] if 0 in modules else []  # type: ignore[union-attr]
    both += [modules[stages - 1].head.weight] if stages - 1 in modules else []  # type: ignore[union-attr]
    shape = build("tied", "cpu", 0, stages).embedding.weight.shape  # type: ignore[union-attr]
    total = torch.zeros(shape, dtype=torch.float64, device=next(iter(next(iter(modules.values())).parameters())).device)
    for weight in both:
        total += weight.grad
    dist.all_reduce(total, group=group)
    for weight in both:
        weight.grad = total.clone()


@cache
def in_one_process(kind: str, stages: int, count: int, steps: int, equal: bool) -> Trained:
    modules = {stage: build(kind, "cpu", stage, stages) for stage in range(stages)}
    last = modules[stages - 1]
    if isinstance(last, Tied):
        last.head.weight = modules[0].embedding.weight  # type: ignore[union-attr, assignment]
    parameters, trained = named(modules), Trained(stages, KINDS[kind].within)
    optimizer = SGD({id(p): p for p in parameters.values() if p.requires_grad}.values(), **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = micro_batches(count, step, "cpu", equal, kind)
        outputs = [passed(list(modules.values()), x) for x in inputs]
        total = torch.stack([loss(out, y) for out, y in zip(outputs, targets, strict=True)])
        total.sum().backward()
        trained.losses.append(total.sum().item())
        if step == 0:
            trained.gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
    trained.parameters = state_of(modules)
    return trained


def differences(ranks: Sequence[Trained], expected: Trained) -> Iterator[str]:
    """A line for each difference from one process."""
    for rank, own in enumerate(ranks):
        yield from differences_on(rank, own, expected)
    for step, losses in enumerate(zip(*(own.losses for own in ranks), strict=True)):
        if not max(losses) - min(losses) <= KINDS["plain"].within * abs(losses[0]):
            yield f"the loss of step {step} is not the same number on every rank: {', '.join(map(repr, losses))}"
    missing = expected.parameters.keys() - {name for own in ranks for name in own.parameters}
    yield from (f"no rank has {name}" for name in sorted(missing))


def differences_on(rank: int, own: Trained, expected: Trained) -> Iterator[str]:
    """A line for each difference of what the rank has, gradients first."""
    for name in own.parameters:
        right, found = expected.gradients.get(name), own.gradients.get(name)
        if right is None and found is not None and found.any():
            yield f"{name} on rank {rank} is frozen, and has a gradient"
        elif right is not None and found is None:
            yield f"{name} on rank {rank} has no gradient"
        elif right is not None and found is not None:
            yield from _difference(f"the gradient of {name} on rank {rank}", found, right, expected.within)
    for step, (returned, right_loss) in enumerate(zip(own.losses, expected.losses, strict=True)):
        if not abs(returned - right_loss) <= (LATER if step else 1) * expected.within * abs(right_loss):
            yield f"the loss of step {step} on rank {rank} is {returned:.12g}, not {right_loss:.12g}"
    for name, found in own.parameters.items():
        yield from _difference(
            f"{name} on rank {rank} at the end", found, expected.parameters[name], LATER * expected.within
        )


def _difference(what: str, found: Tensor, right: Tensor, within: float) -> Iterator[str]:
    if found.shape != right.shape:
        yield f"{what} is of shape {tuple(found.shape)}, not {tuple(right.shape)}"
    elif not (found - right).abs().max() <= within * right.abs().max():
        ratio = (found.flatten() @ right.flatten() / right.square().sum()).item()
        if torch.allclose(found, ratio * right, rtol=1e-9, atol=0):
            yield f"{what} is {ratio:.6g} times what it should be"
        else:
            yield f"{what} is off by {(found - right).abs().max() / right.abs().max():.3g} of its largest value"
