"""Every data-parallel wrapper against one process that has the whole batch."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.whole_batch import (
    DIM,
    MODULES,
    STEPS,
    adam,
    assert_equal_states,
    batch,
    loss,
    module,
    share,
    single_process,
)
from impl.data_parallel import BucketedDataParallel
from impl.data_parallel.buckets import partition
from shardmark.registry import Implementation, family
from shardmark.world import RankError, World

pytestmark = pytest.mark.family("data_parallel")


def _wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    return implementation.adapted(module, **{k: v for k, v in options.items() if implementation.accepts(k)})


def _train(model: Any, rank: int, ranks: int, device: str, accumulate: bool) -> None:
    """Adam steps on this rank's share of each batch; `accumulate` splits each into two backward passes."""
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (tensor[share(rank)] for tensor in batch(step, ranks, device))
        if accumulate:
            with model.no_sync():
                loss(model, x[:1], y[:1]).backward()
            x, y = x[1:], y[1:]
        loss(model, x, y).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


def train_on_rank(
    implementation: Implementation, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Each rank starts from its own weights, so that rank 0's must reach the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _wrap(implementation, module(name, rank, device), **options)
    _train(model, rank, ranks, device, accumulate)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _assert_equals_a_single_process(
    implementation: Implementation, world: World, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, accumulate, options)
    assert_equal_states(ranks, single_process(name, world.size, device, accumulate=accumulate))


@pytest.mark.parametrize("accumulate", [False, True], ids=["every_step", "no_sync"])
@pytest.mark.parametrize("name", MODULES)
def test_parameters_equal_a_single_process_on_the_whole_batch(
    implementation: Implementation, world: World, name: str, accumulate: bool, device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, accumulate, {})


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.parametrize("name", MODULES)
def test_many_buckets_give_the_same(implementation: Implementation, world: World, name: str, device: str) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, False, {"bucket_mb": 0.001})


def unused_on_rank(implementation: Implementation, device: str) -> list[Tensor]:
    """After a step in which every rank's loss reaches both layers, the gradients of one where only rank 0's does."""
    layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)).double().to(device)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.layers[0](x) + (self.layers[1](x) if both else 0)

    model = _wrap(implementation, Both(), find_unused_parameters=True)
    x = torch.ones(1, DIM, dtype=torch.float64, device=device)
    for both in (True, dist.get_rank() == 0):
        model.zero_grad()
        model(x, both).sum().backward()
        model.finish_gradient_synchronization()
    return [p.grad.cpu() for p in model.parameters()]


def test_a_gradient_that_a_rank_does_not_have_counts_as_zero(
    implementation: Implementation, world: World, device: str
) -> None:
    ones = torch.ones(DIM, DIM, dtype=torch.float64)
    expected = [ones, ones[0], ones / world.size, ones[0] / world.size]
    for gradients in world.run(unused_on_rank, implementation, device):
        for found, wanted in zip(gradients, expected, strict=True):
            assert torch.equal(found, wanted)


def wrap_frozen(implementation: Implementation, device: str) -> None:
    _wrap(implementation, nn.Linear(2, 2).requires_grad_(False).to(device))


def wrap_different(implementation: Implementation, device: str, how: str) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if last and how == "shape" else 4)).to(device)
    if last and how == "dtype":
        module[0].bias = nn.Parameter(module[0].bias.detach().double())
    if last and how == "missing":
        module[1].bias = None
    if last and how == "frozen":
        module[1].weight.requires_grad_(False)
    _wrap(implementation, module)


def test_a_module_with_nothing_to_train_is_one_line(implementation: Implementation, world: World, device: str) -> None:
    with pytest.raises(RankError) as caught:
        world.run(wrap_frozen, implementation, device)
    assert isinstance(caught.value.exception, ValueError)
    assert "\n" not in str(caught.value.exception)


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("shape", "1.weight"),
        ("dtype", "0.bias"),
        ("missing", "1.bias"),
        ("frozen", "1.weight"),
    ],
)
def test_modules_that_differ_are_named_by_their_first_parameter(
    implementation: Implementation, world: World, how: str, first: str, device: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank cannot differ from another")
    with pytest.raises(RankError) as caught:
        world.run(wrap_different, implementation, device, how, deadline=10)
    assert isinstance(caught.value.exception, ValueError)
    assert first in str(caught.value.exception) and "\n" not in str(caught.value.exception)


def backward_twice(implementation: Implementation, device: str) -> None:
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    for _ in range(2):
        model(torch.ones(1, 2, device=device)).sum().backward()


@pytest.mark.parametrize("name", ["overlapped", "bucketed"])
def test_a_second_backward_without_no_sync_is_an_error(name: str, world: World, device: str) -> None:
    with pytest.raises(RankError, match=r"backward ran twice before finish_gradient_synchronization\(\)"):
        world.run(backward_twice, family("data_parallel").implementations[name], device)


def wrap_and_let_go(implementation: Implementation, device: str) -> bool:
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    model(torch.ones(1, 2, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    weight = weakref.ref(model.module.weight)
    del model
    gc.collect()
    return weight() is None


def test_a_wrapper_that_is_let_go_frees_its_parameters(
    implementation: Implementation, world: World, device: str
) -> None:
    assert all(world.run(wrap_and_let_go, implementation, device))


@pytest.mark.parametrize("bucket_mb", [0, -1, float("nan")])
def test_bucket_sizes_are_positive(bucket_mb: float) -> None:
    with pytest.raises(ValueError, match="bucket_mb is a positive number of megabytes"):
        BucketedDataParallel(nn.Linear(1, 1), bucket_mb=bucket_mb)


def test_buckets_are_filled_in_order_up_to_their_size() -> None:
    parameters = [nn.Parameter(torch.empty(n)) for n in (2, 3, 9, 1, 1)]
    parameters.append(nn.Parameter(torch.empty(1, dtype=torch.float64)))
    runs = partition(parameters, bucket_bytes=20)  # five float32
    assert [[p.numel() for p in run] for run in runs] == [[2, 3], [9], [1, 1], [1]]
    assert [id(p) for run in runs for p in run] == [id(p) for p in parameters]
