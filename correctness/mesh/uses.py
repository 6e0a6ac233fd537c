"""Ways in which programs use a mesh and a model beside the plain loop: several passes before a backward pass, passes
without gradients, two trainers side by side, a mesh that is a slice of a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from correctness.mesh.training import (
    Trace,
    batches,
    max_norm_of,
    one_process,
    own_batches,
    traced,
    train,
    trainer_of,
)
from impl.mesh import Objective, token_losses
from impl.mesh.decoder import Batch, DecoderSize, token_count
from shardmark.api import Implementation, Mesh

STEPS = 3


def _other(batch: Batch, by: int) -> Batch:
    tokens, positions, targets = batch
    return (tokens + by) % DecoderSize.vocabulary, positions, targets


def _evaluated(model: Any, batch: Batch) -> Tensor:
    """The losses, with those of other tokens without gradients before and after: each counts in the step's loss."""
    with torch.no_grad():
        before = token_losses(model, _other(batch, 1))
    losses = token_losses(model, batch)
    with torch.no_grad():
        after = token_losses(model, _other(batch, 2))
    return losses + before + 2 * after


def _twice(model: Any, batch: Batch) -> Tensor:
    """Two forward passes, on other tokens, before the backward pass of both."""
    return token_losses(model, batch) + 2 * token_losses(model, _other(batch, 1))


def _after_inference(model: Any, batch: Batch) -> Tensor:
    """The losses, behind those of other tokens under inference mode."""
    with torch.inference_mode():
        before = token_losses(model, _other(batch, 1))
    return token_losses(model, batch) + before


def _with_a_metric(model: Any, batch: Batch) -> Tensor:
    """The losses between passes on other tokens, which could have had gradients, and have no backward pass."""
    before = token_losses(model, _other(batch, 1)).detach()
    losses = token_losses(model, batch)
    after = token_losses(model, _other(batch, 2)).detach()
    return losses + before + 2 * after


def _in_eval_mode(model: Any, batch: Batch) -> Tensor:
    """A pass of the model in eval mode, whose gradients are asked for nonetheless."""
    model.eval()
    losses = token_losses(model, batch)
    model.train()
    return losses


USES = {
    "passes without gradients": Objective(_evaluated, token_count),
    "two passes before a backward pass": Objective(_twice, token_count),
    "inference mode": Objective(_after_inference, token_count),
    "passes without a backward pass": Objective(_with_a_metric, token_count),
    "eval mode": Objective(_in_eval_mode, token_count),
}


def train_with(implementation: Implementation, mesh: Mesh, use: str, device: str, max_norm: float) -> Trace:
    trainer = trainer_of(implementation, mesh, "plain", device, max_norm, objective=USES[use])
    return traced(trainer, partial(own_batches, mesh, device), STEPS)


@cache
def used_in_one_process(groups: int, use: str) -> Trace:
    max_norm = max_norm_of(groups, "plain")
    return train(one_process("plain", max_norm, objective=USES[use]), partial(batches, groups), range(STEPS), max_norm)


SIDE_BY_SIDE = ("plain", "tied")
"""The kind of each of two models."""


def train_side_by_side(
    implementation: Implementation, mesh: Mesh, device: str, max_norms: Sequence[float], looked_at: int
) -> Trace:
    """Two trainers that take turns, step by step; the trace is that of one of them."""
    trainers = [
        trainer_of(implementation, mesh, kind, device, max_norm)
        for kind, max_norm in zip(SIDE_BY_SIDE, max_norms, strict=True)
    ]
    own = partial(own_batches, mesh, device)

    def of_step(step: int) -> Sequence[Any]:
        trainers[1 - looked_at].step(own(step + 1))
        return own(step)

    return traced(trainers[looked_at], of_step, STEPS)


APART = 2
"""Meshes that train side by side, each on its own batches."""


def batches_apart(which: int, groups: int, step: int) -> Sequence[Any]:
    return batches(groups, step + 10 * which)


def train_apart(implementation: Implementation, mesh: Mesh, device: str, max_norm: float) -> Trace:
    """Train on a slice of a larger mesh, whose other ranks train on other batches."""
    kind, (axis, _) = torch.device(device).type, mesh.axes[0]
    larger = init_device_mesh(kind, (APART, mesh.size), mesh_dim_names=("apart", axis))
    which, rank = divmod(dist.get_rank(), mesh.size)
    trainer = trainer_of(implementation, mesh, "plain", device, max_norm, on=larger[axis])
    own = partial(own_batches, mesh, device, of=partial(batches_apart, which))
    return traced(trainer, own, STEPS, rank)


@cache
def apart_in_one_process(which: int, groups: int) -> Trace:
    max_norm = max_norm_of(groups, "plain")
    return train(one_process("plain", max_norm), partial(batches_apart, which, groups), range(STEPS), max_norm)
