"""Every sharded optimizer against one process that has the whole batch, and the whole optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.whole_batch import (
    MODULES,
    STEPS,
    assert_equal_states,
    batch,
    loss,
    module,
    share,
    single_process,
)
from impl.data_parallel import BucketedDataParallel
from shardmark.plugin import WorldsBySize
from shardmark.registry import Implementation, family
from shardmark.world import World

pytestmark = pytest.mark.family("sharded_optimizer")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, as people make them: matrices, and all that has one dimension, at another rate."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.02},
    ]


class Training:
    """This rank's share of a training run; with `averages`, the optimizer averages gradients itself."""

    def __init__(
        self, implementation: Implementation, name: str, optimizer: str, device: str, averages: bool, **options: Any
    ) -> None:
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.rows, self.device = share(rank), device
        self.model: Any = module(name, 0, device)
        if averages:
            options |= {"average_gradients": True}
            if implementation.accepts("module"):
                options["module"] = self.model
        else:
            self.model = BucketedDataParallel(self.model)
        cls, defaults = OPTIMIZERS[optimizer]
        self.optimizer = implementation.adapted(groups(self.model), cls, **defaults, **options)
        self.synchronizes = self.optimizer if averages else self.model

    def run(self, first: int, last: int, accumulate: bool = False) -> Training:
        """Those steps."""
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
        """The model's, on the CPU."""
        return {key: tensor.cpu() for key, tensor in self.model.state_dict().items()}


def train_on_rank(*args: Any, accumulate: bool = False, **options: Any) -> dict[str, Tensor]:
    return Training(*args, **options).run(0, STEPS, accumulate).state()


def train_accumulating(*args: Any) -> dict[str, Tensor]:
    return train_on_rank(*args, accumulate=True)


def train_in_small_buckets(*args: Any) -> dict[str, Tensor]:
    return train_on_rank(*args, bucket_mb=0.0005)  # 65 elements of float64


def whole(optimizer: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The optimizer itself, for a single process."""
    cls, defaults = OPTIMIZERS[optimizer]
    return lambda model: cls(groups(model), **defaults)


MODULES_AND_OPTIMIZERS = [
    pytest.param(name, optimizer, marks=() if name == "tied_and_frozen" or optimizer == "adam" else [pytest.mark.sweep])
    for name in MODULES
    for optimizer in OPTIMIZERS
]
"""Every module and every optimizer; their other pairs are left to the sweep, as an optimizer sees no modules."""


@pytest.mark.parametrize(("name", "optimizer"), MODULES_AND_OPTIMIZERS)
def test_behind_a_wrapper_parameters_equal_a_single_process(
    implementation: Implementation, world: World, name: str, optimizer: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, name, optimizer, device, False)
    assert_equal_states(ranks, single_process(name, world.size, device, optimizer=whole(optimizer)))


@pytest.mark.family("sharded_optimizer", option="average_gradients")
@pytest.mark.parametrize(("name", "optimizer"), MODULES_AND_OPTIMIZERS)
def test_averaging_itself_parameters_equal_a_single_process(
    implementation: Implementation, world: World, name: str, optimizer: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, name, optimizer, device, True)
    assert_equal_states(ranks, single_process(name, world.size, device, optimizer=whole(optimizer)))


@pytest.mark.family("sharded_optimizer", option="average_gradients")
@pytest.mark.parametrize("name", MODULES)
def test_two_backward_passes_a_step_accumulate(
    implementation: Implementation, world: World, name: str, device: str
) -> None:
    ranks = world.run(train_accumulating, implementation, name, "adam", device, True)
    assert_equal_states(ranks, single_process(name, world.size, device, accumulate=True, optimizer=whole("adam")))


@pytest.mark.family("sharded_optimizer", option="bucket_mb")
@pytest.mark.parametrize("name", MODULES)
def test_many_buckets_give_the_same(implementation: Implementation, world: World, name: str, device: str) -> None:
    ranks = world.run(train_in_small_buckets, implementation, name, "adam", device, True)
    assert_equal_states(ranks, single_process(name, world.size, device, optimizer=whole("adam")))


@pytest.mark.family("sharded_optimizer", option="average_gradients")
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks_gives_the_same(
    implementation: Implementation, worlds: WorldsBySize, ranks: int, device: str
) -> None:
    for name in MODULES:
        found = worlds(ranks).run(train_on_rank, implementation, name, "adam", device, True)
        assert_equal_states(found, single_process(name, ranks, device, optimizer=whole("adam")))


HALFWAY = STEPS // 2


def train_and_save(implementation: Implementation, optimizer: str, device: str, averages: bool) -> tuple[Any, Any]:
    training = Training(implementation, "tied_and_frozen", optimizer, device, averages).run(0, HALFWAY)
    return training.state(), training.optimizer.state_dict()


def load_and_train(
    implementation: Implementation, optimizer: str, device: str, averages: bool, saved: tuple[Any, Any]
) -> dict[str, Tensor]:
    """Every rank sees the first two ranks' rows of the batch, so that all numbers of ranks train alike."""
    training = Training(implementation, "tied_and_frozen", optimizer, device, averages)
    training.ranks, training.rows = 2, slice(None)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return training.run(HALFWAY, STEPS).state()


@pytest.mark.parametrize("averages", [False, True], ids=["behind_a_wrapper", "averaging_itself"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
def test_state_saved_on_two_ranks_loads_on_any_number_and_into_torchs_own(
    implementation: Implementation,
    worlds: WorldsBySize,
    optimizer: str,
    averages: bool,
    device: str,
) -> None:
    if averages and not implementation.accepts("average_gradients"):
        pytest.skip("it does not average gradients")
    expected = single_process("tied_and_frozen", 2, device, optimizer=whole(optimizer))
    first, second = worlds(2).run(train_and_save, implementation, optimizer, device, averages)
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)
    for ranks in (1, 2, 3, 4):
        found = worlds(ranks).run(load_and_train, implementation, optimizer, device, averages, first)
        assert_equal_states(found, expected)

    model = module("tied_and_frozen", 1, device)
    model.load_state_dict(first[0])
    torchs = whole(optimizer)(model)
    torchs.load_state_dict(first[1])
    for step in range(HALFWAY, STEPS):
        torchs.zero_grad()
        loss(model, *batch(step, 2, device)).backward()
        torchs.step()
    assert_equal_states([{key: tensor.cpu() for key, tensor in model.state_dict().items()}], expected)
