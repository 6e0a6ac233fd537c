"""Common use of our sharded optimizer: mixed dtypes, clipping, closures, reading parameters early."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from correctness.sharded_optimizer.sharding import parameters, raised, set_gradients
from correctness.support.waiting import are_freed
from impl.optim import AdamW
from impl.sharded_optimizer import ShardedOptimizer
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import World

Adam = torch.optim.Adam


SHAPES = ((3, 5), (), (0, 4), (101,), (1,), (7, 1, 3))


LR = 0.1
MIXED_STEPS = 4


def step_mixed(device: str, master_weights: bool) -> list[list[Tensor]]:
    """Train parameters of three dtypes, with a save and load before step 2; return the sharded and the unsharded
    result."""
    results = []
    for sharded in (True, False):
        params = [
            p for d in (torch.float64, torch.bfloat16, torch.float32) for p in parameters(device, *SHAPES, dtype=d)
        ]
        options: dict[str, Any] = {"lr": LR, "master_weights": master_weights}

        def make(params: list[nn.Parameter] = params, options: Any = options, sharded: bool = sharded) -> Any:
            return ShardedOptimizer(params, AdamW, **options) if sharded else AdamW(params, **options)

        optimizer = make()
        for step in range(MIXED_STEPS):
            if step == 2:
                saved = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(saved)
            set_gradients(params, step)
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
    return results


@pytest.mark.parametrize("master_weights", [False, True])
def test_parameters_of_several_dtypes_and_odd_sizes_are_but_for_rounding_those_without_sharding(
    worlds: WorldsBySize, master_weights: bool, device: str
) -> None:
    """Sharding changes which elements the vector instructions take, and so the rounding. Each step rounds the
    parameter, and at most sixteen operations of its update, which is at most `LR`."""
    for ranks in (2, 3):
        for found, expected in worlds(ranks).run(step_mixed, device, master_weights):
            for x, y in zip(found, expected, strict=True):
                eps = MIXED_STEPS * torch.finfo(x.dtype).eps
                torch.testing.assert_close(x, y, rtol=eps, atol=16 * LR * eps)


def start(device: str) -> list[Tensor]:
    """Return a parameter that had the rank's own values before the optimizer was made."""
    p = nn.Parameter(torch.full((5,), float(dist.get_rank() + 1), device=device))
    ShardedOptimizer([p], Adam)
    return p.detach().cpu()


def test_ranks_start_from_rank_0s_parameters(world: World, device: str) -> None:
    assert all(torch.equal(found, torch.ones(5)) for found in world.run(start, device))


def clip(device: str, averages: bool) -> tuple[float, float, list[Tensor], list[Tensor]]:
    """Norms and parameters after our clipping and after torch's on the average gradients."""
    norms, found = [], []
    for sharded in (True, False):
        params = parameters(device, *SHAPES)
        x = torch.arange(1, dist.get_world_size() + 1, dtype=torch.float64, device=device)
        optimizer: Any = (
            ShardedOptimizer(params, torch.optim.SGD, lr=1.0, average_gradients=averages)
            if sharded
            else torch.optim.SGD(params, lr=1.0)
        )
        mine = x[dist.get_rank()] if sharded and averages else x.mean()
        (mine * sum(p.square().sum() for p in params)).backward()
        clip = optimizer.clip_grad_norm_ if sharded else lambda n, params=params: nn.utils.clip_grad_norm_(params, n)
        norms.append(clip(0.5).item())
        optimizer.step()
        found.append([p.detach().cpu() for p in params])
    return norms[0], norms[1], found[0], found[1]


@pytest.mark.parametrize("averages", [False, True])
def test_clipping_is_torchs_on_the_average_gradients(world: World, averages: bool, device: str) -> None:
    for norm, expected_norm, found, expected in world.run(clip, device, averages):
        assert norm == pytest.approx(expected_norm, rel=1e-12) and norm > 1
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def clip_alone(device: str) -> tuple[float, float]:
    """Clip one element, which one rank owns; the others own nothing. Return its norm and value."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64, device=device))
    optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0, average_gradients=True)
    (2 * p).sum().backward()
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return norm.item(), p.item()


def test_ranks_that_own_nothing_clip_too(world: World, device: str) -> None:
    for norm, parameter in world.run(clip_alone, device):
        assert (norm, parameter) == (2.0, pytest.approx(0.5, rel=1e-6))  # torch divides by norm + 1e-6


def use_closure(device: str) -> tuple[float, list[float]]:
    (p,) = parameters(device, (3,))
    optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=0.25, average_gradients=True)
    before = p.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    torch.testing.assert_close(p.detach(), before / 2)
    return loss.item(), before.tolist()


def test_a_closure_is_called_once_and_its_loss_returned(world: World, device: str) -> None:
    for loss, before in world.run(use_closure, device):
        assert loss == pytest.approx(sum(x * x for x in before))


def learn_order(device: str) -> tuple[list[int], list[int]]:
    """Sizes of the buckets in the order of their reduce-scatters, before and after the first step."""
    params = parameters(device, (3,), (5,), (7,))
    optimizer = ShardedOptimizer(
        [{"params": [params[1]]}, {"params": params[::2]}], Adam, average_gradients=True, bucket_mb=1e-6
    )
    orders = []
    for _ in range(2):
        orders.append([bucket.parameters[0].numel() for bucket in optimizer._buckets])
        x = torch.ones((), dtype=torch.float64, device=device)
        for p in params:
            x = (x * p).sum()
        x.backward()
        optimizer.step()
    return orders[0], orders[1]


def test_buckets_are_reduced_in_the_order_in_which_backward_fills_them(world: World, device: str) -> None:
    assert set(map(str, world.run(learn_order, device))) == {"([5, 7, 3], [7, 5, 3])"}


def leave_under_way(device: str) -> list[bool]:
    """For each of six buckets: is its reduce-scatter under way after backward, and after the step?"""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).to(device)
    optimizer = ShardedOptimizer(model.parameters(), Adam, average_gradients=True, bucket_mb=1e-6)
    found = []
    for event in (lambda: model(torch.ones(5, device=device)).sum().backward(), optimizer.step):
        event()
        found += [bucket._reduction is not None for bucket in optimizer._buckets]
    return found


def test_backward_waits_for_no_reduce_scatter(world: World, device: str) -> None:
    """A stream that waits would stall the rest of backward."""
    assert world.run(leave_under_way, device) == world.size * [6 * [True] + 6 * [False]]


class Peeking(nn.Module):
    """A module that reads its child's weight without calling the child."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.child.weight)


def overlap(device: str) -> list[str]:
    """Are all-gathers under way after a step, and after each call that waits for them? Last entry: the error of
    peeking."""
    model, x = nn.Linear(3, 3, device=device), torch.ones(3, device=device)
    optimizer = ShardedOptimizer(model.parameters(), Adam, average_gradients=True, module=model)
    under_way = []
    for wait in (lambda: model(x), model.state_dict, optimizer.finish_parameter_synchronization):
        model(x).sum().backward()
        optimizer.step()
        for after in (lambda: None, wait):
            after()
            under_way.append(str(any(bucket.gathering for bucket in optimizer._buckets)))
    peeking = Peeking(device)
    early = ShardedOptimizer(peeking.parameters(), Adam, module=peeking)
    peeking(x).sum().backward()
    for p in peeking.parameters():
        dist.all_reduce(p.grad)
    early.step()
    return [*under_way, raised(lambda: (peeking(x) + peeking(x)).sum().backward())]  # the first call read stale values


def test_forward_and_state_dict_wait_for_parameters_and_peeking_is_an_error(world: World, device: str) -> None:
    for *under_way, peeked in world.run(overlap, device):
        assert under_way == ["True", "False"] * 3
        assert peeked.startswith("RuntimeError: a parameter of shape (3, 3) was used outside of its own module's")


def freed_after_step(device: str) -> bool:
    model = nn.Linear(2, 2).to(device)
    optimizer = ShardedOptimizer(model.parameters(), Adam, average_gradients=True, module=model)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    weight = weakref.ref(model.weight)
    del model, optimizer
    return are_freed(weight)


def test_an_optimizer_that_is_deleted_frees_its_parameters(world: World, device: str) -> None:
    assert all(world.run(freed_after_step, device))
