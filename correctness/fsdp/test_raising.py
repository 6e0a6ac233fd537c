"""A step that raises or is abandoned: the next step is clean, or one line says why it cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.support.whole_batch import DIM, adam, assert_equal_states, batch, error_line, loss, own_batch
from impl.fsdp import FullyShardedDataParallel, by_type
from shardmark.ranks.world import World

CLEAN = (0, 1, 3)
"""Steps that do not raise, each with its own batch; step 2 raises. By then units are prefetched in the previous step's
order."""


class TrapError(Exception):
    """The error that the trap raises."""


class Trap(nn.Module):
    """A layer that raises where `set` says: in forward, in a checkpoint's recomputation, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.set = ""
        self.passes = 0
        self.under_way: list[int] = []
        # a list, so that the wrapper is not registered as a submodule
        self.wrapper: list[FullyShardedDataParallel] = []

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        self.passes += 1
        self.spring("forward" if self.passes == 1 else "recomputation")
        return Backward.apply(x * self.scale, self)

    def spring(self, where: str) -> None:
        """Raise if `set` names this place; record the number of collectives under way."""
        if where == self.set:
            self.under_way = under_way(self.wrapper[0])
            raise TrapError(where)


class Backward(torch.autograd.Function):
    """The identity; its backward calls `Trap.spring`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:  # type: ignore[override]
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.trap.spring("backward")
        return gradient, None


class Trapped(nn.Module):
    """Layers around a trap; the inner layers are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), Trap(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.last(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=False).tanh())


def under_way(model: FullyShardedDataParallel) -> list[int]:
    """Numbers of flat tensors that are being gathered and that are being reduced."""
    flats = [flat for unit in model.units for flat in unit.flats]
    return [sum(getattr(flat, name) is not None for flat in flats) for name in ("_gathering", "_reducing")]


def nothing_is_left(model: FullyShardedDataParallel) -> bool:
    """True if nothing is gathered or under way and the module holds its shards."""
    shards = {p for unit in model.units for flat in unit.flats for p in flat.parameters}
    gathered = any(flat.gathered or flat.has_gradient for unit in model.units for flat in unit.flats)
    return not gathered and under_way(model) == [0, 0] and set(model.module.parameters()) == shards


def trapped(device: str) -> Trapped:
    torch.manual_seed(0)
    return Trapped().double().to(device)


def step_on_rank(model: FullyShardedDataParallel, step: int, device: str) -> tuple[int, int]:
    """Take a step; return how many flat tensors are gathered after forward, and how many gradients backward left
    unreduced."""
    loss_of_rank = loss(model, *own_batch(step, device))
    flats = [flat for unit in model.units for flat in unit.flats]
    gathered = sum(flat.gathered for flat in flats)
    loss_of_rank.backward()
    left = sum(flat.has_gradient for flat in flats)
    model.finish_gradient_synchronization()
    return gathered, left


def raise_and_go_on(
    where: str, of_the_model: bool, device: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[int], list[str]]:
    """Train with one step that raises. Return the final state, the collectives under way at the error, and later
    errors."""
    module = trapped(device)
    model = FullyShardedDataParallel(module, wrap=by_type(nn.Linear, Trap), **options)
    trap = module.inner[1]
    trap.wrapper.append(model)
    optimizer, said, resources = adam(model), [], set()
    for step in range(4):
        (model if of_the_model else optimizer).zero_grad()
        trap.set, trap.passes = "" if step in CLEAN else where, 0
        if step in CLEAN:
            resources.add(step_on_rank(model, step, device))
            optimizer.step()
            assert nothing_is_left(model)
            continue
        with pytest.raises(TrapError, match=where):
            step_on_rank(model, step, device)
        if where == "forward":
            assert nothing_is_left(model)
        else:
            said += [error_line(RuntimeError, call) for call in (model.finish_gradient_synchronization, optimizer.step)]
        if of_the_model:
            model.zero_grad()
            assert nothing_is_left(model)
    assert len(resources) == 1, "a step after one that raised gathers and reduces when any other does"
    return {name: full.cpu() for name, full in model.gather_full_parameters().items()}, trap.under_way, said


@pytest.mark.parametrize(
    ("options", "of_the_model", "gathering"),
    [
        ({}, False, {"forward": 1, "recomputation": 1, "backward": 1}),
        ({"forward_prefetch": 2, "backward_prefetch": 2}, True, {"forward": 2, "recomputation": 1, "backward": 2}),
        ({"reshard_after_forward": False}, True, {"forward": 1, "recomputation": 0, "backward": 0}),
    ],
    ids=["one_ahead", "two_ahead", "kept"],
)
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_after_a_step_that_raised_the_next_is_clean(
    world: World, where: str, options: dict[str, Any], of_the_model: bool, gathering: dict[str, int], device: str
) -> None:
    plain = trapped("cpu")
    optimizer = adam(plain)
    for step in CLEAN:
        optimizer.zero_grad()
        loss(plain, *batch(step, world.size, "cpu")).backward()
        optimizer.step()
    ranks = world.run(raise_and_go_on, where, of_the_model, device, options)
    assert_equal_states([state for state, _, _ in ranks], plain.state_dict())
    for _, seen, said in ranks:
        assert seen == [gathering[where], where != "forward"]
        assert [line.partition(":")[0] for line in said] == (
            []
            if where == "forward"
            else [
                "backward raised, so that gradients are incomplete",
                "optimizer.step() before finish_gradient_synchronization()",
            ]
        )


def discard_a_step(of_the_model: bool, device: str) -> dict[str, Tensor]:
    """Return the state after a step that follows one abandoned between backward and synchronization."""
    model = FullyShardedDataParallel(trapped(device), wrap=by_type(nn.Linear, Trap))
    optimizer = adam(model)
    loss(model, *own_batch(2, device)).backward()
    (model if of_the_model else optimizer).zero_grad()
    step_on_rank(model, 0, device)
    optimizer.step()
    return {name: full.cpu() for name, full in model.gather_full_parameters().items()}


@pytest.mark.parametrize("of_the_model", [True, False], ids=["model", "optimizer"])
def test_nothing_of_a_step_that_zero_grad_discards_enters_the_next(
    world: World, of_the_model: bool, device: str
) -> None:
    plain = trapped("cpu")
    optimizer = adam(plain)
    loss(plain, *batch(0, world.size, "cpu")).backward()
    optimizer.step()
    assert_equal_states(world.run(discard_a_step, of_the_model, device), plain.state_dict())
