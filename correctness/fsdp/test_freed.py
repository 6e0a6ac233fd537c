"""Sharded models that are freed: nothing keeps their parameters alive, and an optimizer's step still works."""

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from correctness.support.waiting import are_freed
from impl.distributed import check_before_steps
from impl.fsdp import FullyShardedDataParallel
from shardmark.ranks.world import World


def freed_on_rank(device: str) -> bool:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device))
    model(torch.ones(1, 4, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    parameters = [weakref.ref(p) for p in (*model.parameters(), *model.units[1].flats[0].full)]
    del model
    return are_freed(*parameters)


def test_a_deleted_model_frees_its_parameters(world: World, device: str) -> None:
    assert all(world.run(freed_on_rank, device))


def freed_during_step_on_rank(device: str) -> float:
    models: list[nn.Module] = []

    def free(*_: Any) -> None:
        if models:
            models.pop()
            gc.collect()

    among_hooks, among_checks = register_optimizer_step_pre_hook(free), nn.Identity()
    check_before_steps(among_checks, free)
    models += [FullyShardedDataParallel(nn.Linear(4, 4).to(device)) for _ in range(2)]
    other = nn.Parameter(torch.ones(1, device=device))
    other.grad = torch.ones_like(other)
    try:
        torch.optim.SGD([other], lr=1.0).step()
    finally:
        among_hooks.remove()
    assert not models
    return other.item()


def test_a_model_may_be_freed_while_an_optimizer_steps(world: World, device: str) -> None:
    """The garbage collector may run while torch iterates over the hooks before the step."""
    assert world.run(freed_during_step_on_rank, device) == [0.0] * world.size
