"""Every data-parallel wrapper against one process that has the whole batch."""

from __future__ import annotations

import os
import signal
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.processes import are_freed
from correctness.support.whole_batch import (
    DIM,
    MODULES,
    STEPS,
    adam,
    assert_equal_states,
    batch,
    error_line,
    loss,
    module,
    share,
    single_process,
)
from shardmark.plugin import WorldsBySize
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
            # n shares, each rounded, and the sums of them: a sixth six times is less than one.
            rounded = world.size * torch.finfo(torch.float64).eps
            torch.testing.assert_close(found, wanted, rtol=rounded, atol=0)


def wrap_frozen(implementation: Implementation, device: str) -> str:
    return error_line(ValueError, _wrap, implementation, nn.Linear(2, 2).requires_grad_(False).to(device))


def wrap_different(implementation: Implementation, device: str, how: str) -> str:
    last = dist.get_rank() == dist.get_world_size() - 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if last and how == "shape" else 4)).to(device)
    if last and how == "dtype":
        module[0].bias = nn.Parameter(module[0].bias.detach().double())
    if last and how == "missing":
        module[1].bias = None
    if last and how == "frozen":
        module[1].weight.requires_grad_(False)
    return error_line(ValueError, _wrap, implementation, module)


def test_a_module_with_nothing_to_train_is_one_line(implementation: Implementation, world: World, device: str) -> None:
    for line in world.run(wrap_frozen, implementation, device):
        assert "no trainable parameters" in line


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
    for line in world.run(wrap_different, implementation, device, how, deadline=10):
        assert first in line


def backward_twice(implementation: Implementation, in_no_sync: bool, device: str) -> str:
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    model(torch.ones(1, 2, device=device)).sum().backward()
    with model.no_sync() if in_no_sync else nullcontext():
        return error_line(RuntimeError, model(torch.ones(1, 2, device=device)).sum().backward)


@pytest.mark.parametrize("in_no_sync", [False, True], ids=["synchronizing", "no_sync"])
@pytest.mark.parametrize("name", ["overlapped", "bucketed"])
def test_a_second_backward_before_synchronizing_is_an_error(
    name: str, in_no_sync: bool, world: World, device: str
) -> None:
    """Inside `no_sync` too: it would add to gradients that are on their way."""
    for line in world.run(backward_twice, family("data_parallel").implementations[name], in_no_sync, device):
        assert "backward ran twice before finish_gradient_synchronization()" in line


def sparse_gradient(implementation: Implementation, device: str) -> str:
    model = _wrap(implementation, nn.Embedding(4, 2, sparse=True).to(device))
    return error_line(ValueError, model(torch.ones(1, dtype=torch.int64, device=device)).sum().backward)


@pytest.mark.parametrize("name", ["flat", "bucketed"])
def test_a_sparse_gradient_is_one_line_where_gradients_share_a_tensor(name: str, world: World, device: str) -> None:
    for line in world.run(sparse_gradient, family("data_parallel").implementations[name], device):
        assert "gradients must be dense, and that of a parameter of shape (4, 2) is torch.sparse_coo" in line


def step_without_synchronizing(implementation: Implementation, device: str) -> list[str]:
    """What the optimizer says of gradients that are this rank's alone, after every way to have them."""
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2, device=device)

    def backward() -> None:
        model(x).sum().backward()

    lines = []
    backward()
    lines.append(error_line(RuntimeError, optimizer.step))
    model.finish_gradient_synchronization()
    optimizer.step()  # now they are everyone's
    optimizer.zero_grad()
    with model.no_sync():
        backward()
        model.finish_gradient_synchronization()  # does nothing here
    lines.append(error_line(RuntimeError, optimizer.step))
    optimizer.zero_grad()
    optimizer.step()  # they are gone
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # another model's
    backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return lines


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed"])
def test_a_step_on_gradients_that_were_not_synchronized_is_an_error(name: str, world: World, device: str) -> None:
    for lines in world.run(step_without_synchronizing, family("data_parallel").implementations[name], device):
        assert len(lines) == 2
        for line in lines:
            assert "'weight'" in line and "call finish_gradient_synchronization()" in line


class Mixed(nn.Module):
    """A sum of parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes)

    def forward(self, scale: float) -> Tensor:
        """() in float64."""
        return torch.stack([(weight * scale).double().sum() for weight in self.weights]).sum()


def mixed_dtypes_on_rank(implementation: Implementation, device: str, options: dict[str, Any]) -> list[Tensor]:
    model = _wrap(implementation, Mixed().to(device), **options)
    for _ in range(2):
        model.zero_grad()
        model(2.0 * dist.get_rank()).backward()
        model.finish_gradient_synchronization()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"bucket_mb": 1e-5}], ids=["default", "small_buckets"])
def test_parameters_of_several_dtypes(
    implementation: Implementation, world: World, options: dict[str, Any], device: str
) -> None:
    expected = [torch.full_like(weight, world.size - 1) for weight in Mixed().weights]  # the mean of 0, 2, 4, ...
    for found in world.run(mixed_dtypes_on_rank, implementation, device, options):
        for gradient, mean in zip(found, expected, strict=True):
            rounded = world.size * torch.finfo(mean.dtype).eps / 2  # each rank's share once, and each sum
            torch.testing.assert_close(gradient, mean, rtol=rounded, atol=0)


def wrap_and_let_go(implementation: Implementation, device: str) -> bool:
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    model(torch.ones(1, 2, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    weight = weakref.ref(model.module.weight)
    del model
    return are_freed(weight)


def test_a_wrapper_that_is_let_go_frees_its_parameters(
    implementation: Implementation, world: World, device: str
) -> None:
    assert all(world.run(wrap_and_let_go, implementation, device))


def steps(implementation: Implementation, device: str, more_on_rank_0: int) -> None:
    model = _wrap(implementation, nn.Linear(2, 2).to(device))
    for _ in range(1 + (more_on_rank_0 if dist.get_rank() == 0 else 0)):
        model(torch.ones(1, 2, device=device)).sum().backward()
        model.finish_gradient_synchronization()


def test_a_different_number_of_steps_is_told_with_the_stack(worlds: WorldsBySize, device: str) -> None:
    bucketed = family("data_parallel").implementations["bucketed"]
    worlds(2).run(steps, bucketed, device, 0)
    with pytest.raises(RankError, match=r"rank 0 of 2 had not answered after") as caught:
        worlds(2).run(steps, bucketed, device, 1, deadline=2)
    assert "finish_gradient_synchronization" in str(caught.value) and "rank 1 of 2 finished" in str(caught.value)


def killed_in_mid_step(implementation: Implementation, device: str) -> None:
    model = _wrap(implementation, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device))
    if dist.get_rank() == 1:  # when half of the gradients are there
        model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    model(torch.ones(1, 2, device=device)).sum().backward()
    model.finish_gradient_synchronization()


def test_a_rank_killed_in_mid_step_is_told(worlds: WorldsBySize, device: str) -> None:
    bucketed = family("data_parallel").implementations["bucketed"]
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        worlds(2).run(killed_in_mid_step, bucketed, device)
