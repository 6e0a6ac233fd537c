"""The bucketed wrapper can step the optimizer bucket by bucket: same result as one step in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.whole_batch import (
    MODULES,
    STEPS,
    adam,
    assert_equal_states,
    error_line,
    loss,
    module,
    own_batch,
    single_process,
)
from impl.data_parallel import BucketedDataParallel
from shardmark.ranks.world import World


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, and a separate param group for vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if (p.ndim == 1) == vector]} for vector in (False, True)]
    groups[1]["lr"] = 0.02
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def update_on_arrival(
    name: str, device: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Train in buckets of one parameter each; the wrapper steps the optimizer."""
    model = BucketedDataParallel(module(name, dist.get_rank(), device), bucket_mb=1e-5)
    update = optimizer(model)
    groups = update.param_groups
    for step in range(STEPS):
        update.zero_grad()
        loss(model, *own_batch(step, device)).backward()
        model.finish_gradient_synchronization(update)
        assert update.param_groups is groups
    return {key: tensor.cpu() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [adam, sgd], ids=["adam", "sgd_groups"])
@pytest.mark.parametrize("name", MODULES)
def test_an_optimizer_stepped_bucket_by_bucket_equals_a_single_process(
    name: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], world: World, device: str
) -> None:
    ranks = world.run(update_on_arrival, name, device, optimizer)
    assert_equal_states(ranks, single_process(name, world.size, device, optimizer=optimizer))


def update_what_is_not_the_modules(device: str) -> tuple[list[float], float]:
    """Step a scheduled optimizer over two layers and a parameter outside the module; return rates and that
    parameter."""
    model = BucketedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device), bucket_mb=1e-5)
    other = nn.Parameter(torch.zeros((), device=device))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(1, 2, device=device)).sum() - other).backward()
        model.finish_gradient_synchronization(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates, other.item()


def test_schedulers_and_other_parameters_take_part_once_a_step(world: World, device: str) -> None:
    for rates, other in world.run(update_what_is_not_the_modules, device):
        assert rates == [1.0, 0.5, 0.25]
        assert other == sum(rates)


class Counting(torch.optim.SGD):
    """An optimizer that writes counts into its param groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = group["lr"] / 2


def update_groups(device: str) -> list[tuple[int, float, int]]:
    """Return (steps, learning rate, parameters) of each group after three steps, in buckets of one parameter."""
    model = BucketedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device), bucket_mb=1e-5)
    optimizer = Counting([{"params": layer.parameters(), "lr": 2.0**i} for i, layer in enumerate(model.module)])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2, device=device)).sum().backward()
        model.finish_gradient_synchronization(optimizer)
    return [(group["steps"], group["lr"], len(group["params"])) for group in optimizer.param_groups]


def test_what_an_optimizer_writes_into_its_groups_is_kept_once_a_step(world: World, device: str) -> None:
    assert world.run(update_groups, device) == [[(3, 1 / 8, 2), (3, 2 / 8, 2)]] * world.size


class RaisingOnce(torch.optim.SGD):
    """An optimizer that raises in its sixth step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 6:
            raise ZeroDivisionError
        super().step(closure)


def update_after_one_that_raised(device: str) -> tuple[Tensor, Tensor]:
    """Return a bias's gradient before, and after, a step whose optimizer raised at the second of four buckets."""
    model = BucketedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device), bucket_mb=1e-5)
    optimizer, gradients = RaisingOnce(model.parameters(), lr=0.0), []
    for raises in (False, True, False):
        optimizer.zero_grad()
        model(torch.full((1, 2), dist.get_rank() + 1.0, device=device)).sum().backward()
        with pytest.raises(ZeroDivisionError) if raises else nullcontext():
            model.finish_gradient_synchronization(optimizer)
        gradients.append(model.module[0].weight.grad.cpu().clone())
    return gradients[2], gradients[0]


def test_the_step_after_one_in_which_the_optimizer_raised_is_as_any_other(world: World, device: str) -> None:
    for after, before in world.run(update_after_one_that_raised, device):
        assert torch.equal(after, before)


def update_in_no_sync(device: str) -> str:
    model = BucketedDataParallel(nn.Linear(2, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        model(torch.ones(1, 2, device=device)).sum().backward()
        return error_line(RuntimeError, model.finish_gradient_synchronization, optimizer)


def test_an_optimizer_inside_no_sync_is_an_error(world: World, device: str) -> None:
    for line in world.run(update_in_no_sync, device):
        assert "gradients inside no_sync() are this rank's alone" in line
