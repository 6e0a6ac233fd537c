"""Every data-parallel wrapper trains like one process with the whole batch."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from correctness.data_parallel.averaging import wrap
from correctness.support import whole_batch
from correctness.support.own_model import OWN, Trained, assert_as_in_one_process, optimizer_of, own_model, train
from correctness.support.whole_batch import (
    MODULES,
    ONE_MODULE,
    adam,
    assert_equal_states,
    module,
    single_process,
)
from shardmark.api import Implementation, OwnModelCase
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")


def train_on_rank(
    implementation: Implementation, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Start each rank from its own weights: rank 0's must reach the others."""
    model = wrap(implementation, module(name, dist.get_rank(), device), **options)
    finish = model.finish_gradient_synchronization
    whole_batch.train(model, adam(model.module), device, finish, accumulate=accumulate)
    return {name: tensor.cpu() for name, tensor in model.module.state_dict().items()}


def _assert_equals_a_single_process(
    implementation: Implementation, world: World, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, accumulate, options)
    assert_equal_states(ranks, single_process(name, world.size, device, accumulate=accumulate))


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param(
            name, accumulate, id=f"{name}-{how}", marks=[] if (name == "plain") != accumulate else pytest.mark.judged
        )
        for name in MODULES
        for how, accumulate in (("every_step", False), ("no_sync", True))
    ],
)
def test_parameters_equal_a_single_process_on_the_whole_batch(
    implementation: Implementation, world: World, name: str, accumulate: bool, device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, accumulate, {})


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.parametrize("name", ONE_MODULE)
def test_many_buckets_give_the_same(implementation: Implementation, world: World, name: str, device: str) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, False, {"bucket_mb": 0.001})


def train_own_model_on_rank(implementation: Implementation, case: OwnModelCase, device: str) -> Trained:
    own = own_model(case, device, dist.get_rank())
    model = implementation.watched(own.module)
    optimizer = optimizer_of(case, own)(list(model.parameters()))
    return train(model, case, device, model.module.named_parameters, optimizer, model)


@pytest.mark.cases(OWN)
def test_a_users_own_model_trains_as_in_one_process(
    implementation: Implementation, world: World, case: OwnModelCase, device: str
) -> None:
    ranks = world.run(train_own_model_on_rank, implementation, case, device)
    assert_as_in_one_process(ranks, case, device)
