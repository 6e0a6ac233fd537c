"""A user's own model (`--model`) on a mesh: ranks of one group of rows see the same batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from correctness.mesh.differences import differences
from correctness.mesh.training import Trace, traced, train
from correctness.support.complaints import assert_none
from correctness.support.own_model import (
    CLOSE,
    OWN,
    STEPS,
    check_what_it_draws,
    optimizer_of,
    own_model,
    skipping_what_lacks_float64,
)
from impl.mesh import Objective, OneProcess, by_mesh, mean_of
from impl.mesh.contract import makes_trainer
from impl.mesh.workload import own_slices
from shardmark.api import Implementation, Loss, Made, Mesh, NotAsked, OwnModelCase
from shardmark.plugin import WorldsBySize


@pytest.mark.family("mesh")
@pytest.mark.cases(OWN)
@pytest.mark.meshes("dp=2", "shard=2", "dp=2,tp=2")
def test_a_users_own_model_trains_as_in_one_process(
    implementation: Implementation, case: OwnModelCase, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    if makes_trainer(implementation.target):
        raise NotAsked("a trainer has a loss of its own: --model is for parallelize(model, mesh)")
    expected = _in_one_process(case, mesh.row_groups, device)
    ranks = worlds(mesh.size).run(train_on_rank, implementation, case, mesh, device)
    assert_none(differences(ranks, expected, mesh, CLOSE))


def train_on_rank(implementation: Implementation, case: OwnModelCase, mesh: Mesh, device: str) -> Trace:
    made = own_model(case, device, 0)
    trainer = implementation.watched(
        lambda: made.module,
        partial(_optimizer, case, made),
        mesh.device_mesh(torch.device(device).type),
        max_norm=_max_norm(case),
        objective=_objective(made.loss),
    )
    rank = dist.get_rank()

    def of_step(step: int) -> list[Any]:
        whole = _batches(case, device, mesh.row_group(rank), step)
        return [(seed, *own_slices(mesh, batch, rank)) for seed, *batch in whole]

    return traced(trainer, of_step, STEPS)


@cache
def _in_one_process(case: OwnModelCase, groups: int, device: str) -> Trace:
    """Train on the batches of all groups of rows, each as a micro-batch."""
    made = own_model(case, device, 0)
    check_what_it_draws(made, own_model(case, device, 0), own_model(case, device, 1))
    trainer = OneProcess(
        lambda: made.module,
        partial(_optimizer, case, made),
        None,
        max_norm=_max_norm(case),
        objective=_objective(made.loss),
    )

    def of_step(step: int) -> list[Any]:
        return [batch for group in range(groups) for batch in _batches(case, device, group, step)]

    with skipping_what_lacks_float64(case):
        return train(trainer, of_step, range(STEPS), _max_norm(case))


def _batches(case: OwnModelCase, device: str, group: int, step: int) -> list[Any]:
    """The micro-batches of a group of rows, each with a seed of its own for dropout."""
    numbers = range(step * case.recipe.micro_batches, (step + 1) * case.recipe.micro_batches)
    return [(1000 * number + group, *own_model(case, device, group, number).batch) for number in numbers]


def _objective(loss: Loss) -> Objective:
    def seeded(model: nn.Module, seed: int, *batch: Any) -> Tensor:
        torch.manual_seed(seed)
        return loss(model, *batch)

    return mean_of(seeded)


def _optimizer(case: OwnModelCase, made: Made, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    return optimizer_of(case, made)(by_mesh([parameter for _, parameter in named]))


def _max_norm(case: OwnModelCase) -> float:
    return math.inf if case.recipe.clip is None else case.recipe.clip
