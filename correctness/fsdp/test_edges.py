"""Full sharding in unusual cases: checkpointed activations, odd parameters, modules on meta."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.fsdp.checks import (
    as_expected,
    assert_none,
    gradients_as_expected,
    gradients_of,
    make,
    on_every_rank,
    parameters_of,
)
from correctness.fsdp.two_dtypes import wrong_of_two_dtypes
from correctness.support.whole_batch import DIM
from impl.fsdp import FullyShardedDataParallel, by_type, whole
from impl.model.mlp import MLPBlock, MLPLanguageModel, MLPSize
from impl.sharded_optimizer import ShardedOptimizer
from shardmark.api import Implementation, family
from shardmark.meter.memory import meter
from shardmark.ranks.world import World


class Blocks(nn.Module):
    """Four blocks that `impl.checkpointing` can checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


def checkpointed_on_rank(name: str, device: str) -> str:
    """Units inside checkpointed blocks, and checkpointed blocks that are units; checkpointed before and after
    sharding."""
    x = torch.ones(3, DIM, dtype=torch.float64, device=device)
    plain = make(Blocks, 0, device)
    plain(x).sum().backward()
    policy = family("checkpointing").implementations[name].target
    for wrap in (by_type(nn.Linear), by_type(nn.Sequential), whole):
        for checkpoint_first in (True, False):
            module = make(Blocks, 0, device)
            model = FullyShardedDataParallel(policy(module) if checkpoint_first else module, wrap=wrap)
            if not checkpoint_first:
                policy(model.module)
            for _ in range(2):  # the second step prefetches
                model.zero_grad()
                model(x).sum().backward()
                model.finish_gradient_synchronization()
            assert all(not flat.gathered for unit in model.units for flat in unit.flats)
            if problem := gradients_as_expected("checkpointed, the gradient of", model, plain):
                return problem
    return ""


@pytest.mark.parametrize("name", ["full", "selective"])
def test_activation_checkpointing_within_and_around_units_changes_nothing(world: World, name: str, device: str) -> None:
    assert_none(world.run(checkpointed_on_rank, name, device))


class Mixed(nn.Module):
    """Parameters of two dtypes, one with empty shards on most ranks, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float32))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 1)."""
        return self.layer(x) * self.scale


def odd_ones_on_rank(device: str) -> None:
    """Mixed dtypes, empty shards, an optimizer made before sharding, and evaluation between passes."""
    torch.manual_seed(0)
    module, plain = Mixed().to(device), Mixed().to(device)
    plain.load_state_dict(module.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, plain)]
    model = FullyShardedDataParallel(module, wrap=whole)
    x = torch.ones(2, DIM, dtype=torch.float64, device=device)
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).sum().backward()
            with torch.no_grad():
                m(x)
            if m is model:
                model.finish_gradient_synchronization()
            m(x)  # gathers values that are stale after the step
            optimizer.step()
    assert torch.equal(module.unused.grad, torch.zeros_like(module.unused))
    for name, full in model.gather_full_parameters().items():
        torch.testing.assert_close(full, plain.state_dict()[name])


def test_dtypes_mix_shards_may_be_empty_and_the_optimizer_may_come_first(world: World, device: str) -> None:
    world.run(odd_ones_on_rank, device)


def made_from_meta_on_rank(device: str) -> tuple[int, int, int, list[str], list[float]]:
    """Materialize a meta model unit by unit. Return peak and final bytes, full size, names left on meta, deviations."""
    size = MLPSize(64, 6, vocab=96)
    with torch.device("meta"):
        module = MLPLanguageModel(size)
    with meter(device) as memory:
        model = FullyShardedDataParallel(module, wrap=by_type(MLPBlock, nn.Embedding), device=device)
        memory.mark("made")
    full = model.gather_full_parameters()
    weights = [full[name].std().item() for name in ("embedding.weight", "blocks.3.w1.weight", "norm.weight")]
    names = [name for name, value in full.items() if value.is_meta]
    model(torch.zeros(2, 3, dtype=torch.int64, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    return memory.tensors, memory.phases["made"], 4 * size.parameters, names, weights


def test_a_meta_module_is_made_unit_by_unit_and_never_held_whole(world: World, device: str) -> None:
    ranks = world.run(made_from_meta_on_rank, device)
    block = 4 * (2 * 64 * 256 + 256 + 64)
    for peak, made, whole_size, left_on_meta, (embedding, linear, norm) in ranks:
        assert not left_on_meta
        assert whole_size // world.size <= made <= whole_size // world.size + 1024
        # Room for the last block's values and for the flat tensor that sends them; the shard is cut from it.
        assert peak <= made + 2 * block + block // world.size + 1024
        if world.size > 1:
            assert peak < 0.9 * whole_size
        assert (embedding, norm) == (pytest.approx(1, rel=0.1), 0) and 0 < linear < 0.1
        assert ranks[0][4] == [embedding, linear, norm]


def applied_to_its_own_output_on_rank(device: str) -> str:
    """The backward of one call must not free what that of the other call is about to read."""
    layer, plain = (make(partial(nn.Linear, DIM, DIM), 0, device) for _ in range(2))
    model = FullyShardedDataParallel(nn.Sequential(layer, layer, layer), wrap=by_type(nn.Linear))
    x = torch.ones(2, DIM, dtype=torch.float64, device=device)
    for each in (nn.Sequential(plain, plain, plain), model):
        each(x).square().sum().backward()
    model.finish_gradient_synchronization()
    return gradients_as_expected("the gradient of", model, nn.Sequential(plain))


def test_a_unit_may_be_applied_to_its_own_output(world: World, device: str) -> None:
    assert_none(world.run(applied_to_its_own_output_on_rank, device))


@dataclass
class Found:
    hidden: Tensor
    more: list[Tensor]


class Caching(nn.Module):
    """A layer that writes a result into the caller's dict and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, given: Found, cache: dict[str, Any]) -> Found:
        hidden = self.layer(given.hidden) + given.more[0]
        cache[f"call {len(cache)}"] = hidden.detach()
        return Found(hidden.tanh(), [hidden.sin()])


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Found:
        found = Found(x, [x])
        for part in self.parts:
            found = part(found, cache=cache)
        return found


def cached_on_rank(device: str) -> str:
    x = torch.ones(3, DIM, dtype=torch.float64, device=device)
    plain = make(Cached, 0, device)
    model = FullyShardedDataParallel(make(Cached, 0, device), wrap=by_type(Caching))
    for use in (lambda found: found.hidden, lambda found: found.more[0]):
        model.zero_grad()
        plain.zero_grad()
        for each in (plain, model):
            cache: dict[str, Any] = {}
            use(each(x, cache)).square().sum().backward()
            assert list(cache) == ["call 0", "call 1", "call 2"], f"{type(each).__name__} left {list(cache)}"
        model.finish_gradient_synchronization()
        if problem := gradients_as_expected("the gradient of", model, plain):
            return problem
        plain.load_state_dict(model.gather_full_parameters())  # the check of the gradients took a step
    return ""


def test_units_take_and_return_dataclasses_and_write_into_what_they_are_given(world: World, device: str) -> None:
    assert_none(world.run(cached_on_rank, device))


class Added(nn.Module):
    """A unit of one parameter, whose gradient is a view of its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(4 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.view(4, DIM)


class WithAdded(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), Added())


def shared_gradient_on_rank(kind: str, device: str) -> str:
    """Put a layer before the unit: its backward runs while the unit's gradient is being reduced."""
    x = torch.rand(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    module, plain = (make(WithAdded, 0, device) for _ in range(2))
    before = parameters_of(plain)
    plain(x).square().sum().backward()
    if kind == "fsdp":
        model = FullyShardedDataParallel(module, wrap=by_type(nn.Linear, Added))
        model(x).square().sum().backward()
        model.finish_gradient_synchronization()
        return gradients_as_expected("the gradient of", model, plain)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, average_gradients=True, bucket_mb=1e-6, lr=1.0)
    module(x).square().sum().backward()
    optimizer.step()
    found = {name: before[name] - after for name, after in parameters_of(module).items()}
    return as_expected("the gradient of", found, gradients_of(plain))


@pytest.mark.parametrize("kind", ["fsdp", "sharded_optimizer"])
def test_a_gradient_that_other_nodes_still_read_is_not_overwritten(world: World, kind: str, device: str) -> None:
    assert_none(world.run(shared_gradient_on_rank, kind, device))


@pytest.mark.family("fsdp", only=("sharded", "simple"))
@on_every_rank
def test_complex_parameters_are_not_cast(implementation: Implementation, device: str) -> str:
    """`compute_dtype` has no imaginary part."""
    return wrong_of_two_dtypes(implementation, torch.complex64, device, torch.bfloat16)
