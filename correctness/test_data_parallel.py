"""Every data-parallel wrapper against one process that has the whole batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.data_parallel import BucketedDataParallel
from impl.data_parallel.bucketed import partition
from shardmark.registry import Implementation, family
from shardmark.world import RankError, World

pytestmark = pytest.mark.family("data_parallel")

STEPS, ROWS = 5, 3  # rows of the batch on each rank
DIM = 6


class TiedAndFrozen(nn.Module):
    """An input layer whose weight is also the output's, a frozen layer between them, and a buffer in use."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, 2 * DIM)
        self.frozen = nn.Linear(2 * DIM, 2 * DIM).requires_grad_(False)
        self.hidden = nn.Linear(2 * DIM, DIM)
        self.tied = nn.Linear(DIM, 2 * DIM)
        self.tied.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.embed(x).tanh())
        return self.tied(self.hidden(x).tanh() + self.offset)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2 * DIM))


MODULES: dict[str, Callable[[], nn.Module]] = {"plain": _plain, "tied_and_frozen": TiedAndFrozen}


def _wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    return implementation.adapted(module, **{k: v for k, v in options.items() if implementation.accepts(k)})


def _module(name: str, seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    return MODULES[name]().double().to(device)


def _batch(step: int, ranks: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch, the same on every rank that asks."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ranks * ROWS, n, generator=generator, dtype=torch.float64) for n in (DIM, 2 * DIM))
    return x.to(device), y.to(device)


def _train(model: Any, rows: slice, ranks: int, device: str, finish: Callable[[], None], accumulate: bool) -> None:
    """Adam steps on the mean loss of `rows` of each batch; `accumulate` splits each into two backward passes."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (tensor[rows] for tensor in _batch(step, ranks, device))
        if accumulate:
            with model.no_sync():
                (model(x[:1]) - y[:1]).square().mean().backward()
            (model(x[1:]) - y[1:]).square().mean().backward()
        else:
            (model(x) - y).square().mean().backward()
        finish()
        optimizer.step()


class _NoRanks(nn.Module):
    """The module alone, with the wrapper's `no_sync`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def train_on_rank(
    implementation: Implementation, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Each rank starts from its own weights, so that rank 0's must reach the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _wrap(implementation, _module(name, rank, device), **options)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    _train(model, rows, ranks, device, model.finish_gradient_synchronization, accumulate)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _single_process(name: str, ranks: int, device: str, accumulate: bool) -> dict[str, Tensor]:
    """The same steps on the whole batch, from rank 0's weights."""
    module = _module(name, 0, device)
    model = _NoRanks(module)
    if not accumulate:
        _train(model, slice(None), ranks, device, lambda: None, accumulate=False)
    else:  # each rank's first row, then the rest, as the ranks accumulate them
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (tensor.view(ranks, ROWS, -1) for tensor in _batch(step, ranks, device))
            for part in (slice(0, 1), slice(1, None)):
                (module(x[:, part]) - y[:, part]).square().mean().backward()
            optimizer.step()
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


def _assert_equals_a_single_process(
    implementation: Implementation, world: World, name: str, device: str, accumulate: bool, options: dict[str, Any]
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, accumulate, options)
    expected = _single_process(name, world.size, device, accumulate)
    assert list(ranks[0]) == list(expected)  # the module's own names
    for rank in ranks:
        for key, value in rank.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
            assert torch.equal(value, ranks[0][key]), f"{key} is not the same on every rank"


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
