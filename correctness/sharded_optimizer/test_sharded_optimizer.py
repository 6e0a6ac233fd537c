"""Models trained with every sharded optimizer, against one process with the full batch and an unsharded state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.engine.histories_on_ranks import even_and_odd_ranks
from correctness.sharded_optimizer.player import assert_value
from correctness.support.communication import delayed
from correctness.support.own_model import (
    OWN,
    Trained,
    assert_as_in_one_process,
    clipping,
    optimizer_of,
    own_model,
    train,
)
from correctness.support.whole_batch import (
    MODULES,
    ONE_MODULE,
    STEPS,
    assert_equal_states,
    batch,
    exact_single_process,
    loss,
    module,
    share,
    single_process,
)
from impl.data_parallel import BucketedDataParallel
from shardmark.api import Implementation, OwnModelCase, taken_apart
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

ADAM: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.Adam, {"lr": 0.01, "amsgrad": True})


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, as is usual: matrices, and one-dimensional parameters with another learning rate."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.02},
    ]


class Training:
    """This rank's share of a training run; with `averages`, the optimizer averages gradients itself."""

    def __init__(self, implementation: Implementation, name: str, device: str, averages: bool, **options: Any) -> None:
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.rows, self.device = share(rank), device
        self.model: Any = module(name, 0, device)
        if averages:
            options |= {"average_gradients": True}
            if implementation.accepts("module"):
                options["module"] = self.model
        else:
            self.model = BucketedDataParallel(self.model)
        cls, defaults = ADAM
        self.optimizer = implementation.watched(groups(self.model), cls, **defaults, **options)
        self.synchronizes = self.optimizer if averages else self.model

    def run(self, first: int, last: int, accumulate: bool = False) -> Training:
        """Run steps `first` to `last` (exclusive)."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, y = (tensor[self.rows] for tensor in batch(step, self.ranks, self.device))
            if accumulate:
                with self.synchronizes.no_sync():
                    loss(self.model, x[:1], y[:1]).backward()
                x, y = x[1:], y[1:]
            loss(self.model, x, y).backward()
            self.synchronizes.finish_gradient_synchronization()
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Tensor]:
        """The model's state, on the CPU."""
        return {key: tensor.cpu() for key, tensor in self.model.state_dict().items()}


def train_on_rank(*args: Any, accumulate: bool = False, **options: Any) -> dict[str, Tensor]:
    return Training(*args, **options).run(0, STEPS, accumulate).state()


def train_with_a_late_rank(*args: Any) -> dict[str, Tensor]:
    with delayed(before=0.005, on=dist.get_world_size() - 1):
        return train_on_rank(*args)


def whole(model: nn.Module) -> torch.optim.Optimizer:
    """Return the unsharded optimizer for the single process."""
    cls, defaults = ADAM
    return cls(groups(model), **defaults)


def assert_equals_a_single_process(
    world: World, train: Callable[..., Any], *args: Any, averages: bool = True, accumulate: bool = False
) -> None:
    """Assert that `train(implementation, name, device, averages)`, with `args` the first three, ends on every rank as
    one process does."""
    ranks = world.run(train, *args, averages)
    _, name, device = args
    expected, close = exact_single_process(name, world.size, device, accumulate=accumulate, optimizer=whole)
    assert_equal_states(ranks, expected, close)


@pytest.mark.parametrize("name", MODULES)
def test_behind_a_wrapper_parameters_equal_a_single_process(
    implementation: Implementation, world: World, name: str, device: str
) -> None:
    assert_equals_a_single_process(world, train_on_rank, implementation, name, device, averages=False)


@pytest.mark.family("sharded_optimizer", option="average_gradients")
@pytest.mark.parametrize("accumulate", [False, True], ids=["every_step", "no_sync"])
@pytest.mark.parametrize("name", ONE_MODULE)
def test_averaging_itself_parameters_equal_a_single_process(
    implementation: Implementation, world: World, name: str, accumulate: bool, device: str
) -> None:
    train = partial(train_on_rank, accumulate=accumulate)
    assert_equals_a_single_process(world, train, implementation, name, device, accumulate=accumulate)


@pytest.mark.family("sharded_optimizer", option="average_gradients")
def test_averages_and_updates_are_waited_for(implementation: Implementation, world: World, device: str) -> None:
    """Results stay right though one rank is late in each of its collectives."""
    assert_equals_a_single_process(world, train_with_a_late_rank, implementation, "used_twice", device)


@pytest.mark.family("sharded_optimizer", option="bucket_mb")
@pytest.mark.parametrize("name", ONE_MODULE)
def test_many_buckets_give_the_same(implementation: Implementation, world: World, name: str, device: str) -> None:
    train = partial(train_on_rank, bucket_mb=0.0005)  # buckets of 65 float64 elements
    assert_equals_a_single_process(world, train, implementation, name, device)


@pytest.mark.family("sharded_optimizer", option="average_gradients")
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_gives_the_same(
    implementation: Implementation, worlds: WorldsBySize, ranks: int, device: str
) -> None:
    for name in MODULES:
        assert_equals_a_single_process(worlds(ranks), train_on_rank, implementation, name, device)


def average_in_groups(implementation: Implementation, device: str) -> Tensor:
    """Even and odd ranks average in separate groups; each rank's gradient is its global rank plus one."""
    _, group = even_and_odd_ranks()
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64, device=device))
    optimizer = implementation.watched([p], torch.optim.SGD, process_group=group, average_gradients=True, lr=1.0)
    ((dist.get_rank() + 1) * p).sum().backward()
    optimizer.step()
    return p.detach().cpu()


@pytest.mark.family("sharded_optimizer", option="average_gradients")
def test_averages_are_over_the_process_group(implementation: Implementation, world: World, device: str) -> None:
    for rank, found in enumerate(world.run(average_in_groups, implementation, device)):
        side = [other + 1 for other in range(rank % 2, world.size, 2)]
        expected = torch.full((5,), -sum(side) / len(side), dtype=torch.float64)
        assert_value(f"on rank {rank}, of a group of {len(side)}, the parameter", found, expected)


HALFWAY = STEPS // 2


def train_and_save(implementation: Implementation, device: str) -> tuple[Any, Any]:
    training = Training(implementation, "tied_and_frozen", device, True).run(0, HALFWAY)
    return training.state(), training.optimizer.state_dict()


def load_and_train(implementation: Implementation, device: str, saved: tuple[Any, Any]) -> dict[str, Tensor]:
    """Every rank sees the rows of the first two ranks, so any number of ranks trains alike."""
    training = Training(implementation, "tied_and_frozen", device, True)
    training.ranks, training.rows = 2, slice(None)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return training.run(HALFWAY, STEPS).state()


@pytest.mark.family("sharded_optimizer", option="average_gradients")
def test_state_saved_on_two_ranks_loads_on_any_number(
    implementation: Implementation, worlds: WorldsBySize, device: str
) -> None:
    expected = single_process("tied_and_frozen", 2, device, optimizer=whole)
    first = worlds(2).run(train_and_save, implementation, device)[0]
    for ranks in (1, 2, 3):
        found = worlds(ranks).run(load_and_train, implementation, device, first)
        assert_equal_states(found, expected)


def train_own_model_on_rank(implementation: Implementation, case: OwnModelCase, device: str) -> Trained:
    """Train a user's model; the optimizer averages gradients if it can, else a wrapper does."""
    own = own_model(case, device, dist.get_rank())
    model: Any = own.module
    averages = implementation.accepts("average_gradients")
    options = {"average_gradients": True, "module": model} if averages else {}
    wrapped = model if averages else BucketedDataParallel(model)
    parameters, kind, defaults = taken_apart(optimizer_of(case, own), model.parameters())
    optimizer = implementation.watched(parameters, kind, **defaults, **options)
    clip = clipping(optimizer) if averages else None
    # the state dict waits for the last update
    return train(wrapped, case, device, model.state_dict, optimizer, optimizer if averages else wrapped, clip)


@pytest.mark.cases(OWN)
def test_a_users_own_model_trains_as_in_one_process(
    implementation: Implementation, world: World, case: OwnModelCase, device: str
) -> None:
    ranks = world.run(train_own_model_on_rank, implementation, case, device)
    assert_as_in_one_process(ranks, case, device)
