"""Every way to shard everything against one process that has the whole model and the whole batch."""

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
from impl.fsdp import FullyShardedDataParallel, by_size, by_type, whole
from impl.fsdp.sharded import Order
from impl.model.mlp import MLPBlock, MLPLanguageModel, MLPSize
from shardmark.memory import meter
from shardmark.registry import Implementation, family
from shardmark.world import World

pytestmark = pytest.mark.family("fsdp")

WRAPS = {"linears": by_type(nn.Linear), "by_size": by_size(100), "whole": whole}


def _wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    return implementation.adapted(module, **{k: v for k, v in options.items() if implementation.accepts(k)})


def full_state(model: Any, module: nn.Module) -> dict[str, Tensor]:
    """The whole state as the unwrapped `module` would have it, on the CPU; buffers as they are there."""
    full = dict(module.named_buffers()) | model.gather_full_parameters()
    return {name: full[name].cpu() for name in module.state_dict()}


def train_on_rank(
    implementation: Implementation, name: str, device: str, wrap: str, accumulate: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Each rank starts from its own weights, so that rank 0's must reach the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _wrap(implementation, module(name, rank, device), wrap=WRAPS[wrap], **options)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (tensor[share(rank)] for tensor in batch(step, ranks, device))
        if accumulate:
            loss(model, x[:1], y[:1]).backward()
            if accumulate == "finish_each":
                model.finish_gradient_synchronization()
            x, y = x[1:], y[1:]
        loss(model, x, y).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return full_state(model, module(name, 0, device))


OURS = ("sharded_plain", "sharded", "sharded_kept")


def _assert_equals_a_single_process(
    implementation: Implementation,
    world: World,
    name: str,
    device: str,
    wrap: str = "linears",
    accumulate: str = "",
    **options: Any,
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, wrap, accumulate, options)
    assert_equal_states(ranks, single_process(name, world.size, device))


@pytest.mark.parametrize("name", MODULES)
def test_parameters_equal_a_single_process_on_the_whole_batch(
    implementation: Implementation, world: World, name: str, device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device)


@pytest.mark.family("fsdp", only=OURS)
@pytest.mark.parametrize("wrap", ["by_size", "whole"])
@pytest.mark.parametrize("name", MODULES)
def test_units_of_any_size_give_the_same(
    implementation: Implementation, world: World, name: str, wrap: str, device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, wrap)


@pytest.mark.family("fsdp", only=("sharded",))
@pytest.mark.parametrize(
    "options",
    [
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"forward_prefetch": 2, "backward_prefetch": 0, "reshard_after_forward": False},
        {"cpu_offload": True},
    ],
    ids=["two_ahead", "kept_two_ahead", "offloaded"],
)
@pytest.mark.parametrize("name", MODULES)
def test_every_option_gives_the_same(
    implementation: Implementation, world: World, name: str, options: dict[str, Any], device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, **options)


@pytest.mark.family("fsdp", only=("sharded",))
@pytest.mark.parametrize("accumulate", ["finish_once", "finish_each"])
def test_gradients_of_two_backward_passes_add_up(
    implementation: Implementation, world: World, accumulate: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, "tied_and_frozen", device, "linears", accumulate, {})
    assert_equal_states(ranks, single_process("tied_and_frozen", world.size, device, accumulate=True))


def contract_on_rank(implementation: Implementation, device: str) -> None:
    """What the contract says of one step, and clipping beside PyTorch's of the whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole_module = module("tied_and_frozen", 0, device)
    model = _wrap(implementation, module("tied_and_frozen", rank, device), wrap=whole)
    for before, after in zip(whole_module.modules(), _unwrapped(model), strict=True):
        assert isinstance(after, type(before))
    for step in range(2):
        x, y = batch(step, ranks, device)
        loss(whole_module, x, y).backward()
        loss(model, x[share(rank)], y[share(rank)]).backward()
        model.finish_gradient_synchronization()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
        elif parameter.numel():
            assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
    for max_norm in (0.5, 100.0):
        expected = nn.utils.clip_grad_norm_(whole_module.parameters(), max_norm)
        torch.testing.assert_close(model.clip_grad_norm_(max_norm), expected, rtol=1e-12, atol=0)
    torch.optim.SGD(whole_module.parameters(), lr=1.0).step()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, full in model.gather_full_parameters().items():
        torch.testing.assert_close(full, whole_module.state_dict()[name], rtol=1e-12, atol=1e-12)


def _unwrapped(model: Any) -> list[nn.Module]:
    return [part for part in model.module.modules() if type(part).__name__ != "FullyShardedDataParallel"]


@pytest.mark.family("fsdp", only=(*OURS, "fsdp1", "fsdp2"))
def test_gradients_are_the_shards_own_and_are_clipped_by_the_norm_over_all_ranks(
    implementation: Implementation, world: World, device: str
) -> None:
    world.run(contract_on_rank, implementation, device)


def mixed_precision_on_rank(name: str, device: str, reduce_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Averaged gradients of float32 parameters in bfloat16, or as they are in float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = module("plain", 0, device)
    exact = name == "float64"
    options: dict[str, Any] = {} if exact else {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    entry = family("fsdp").implementations["sharded" if exact else name]
    model = _wrap(entry, plain if exact else plain.float(), wrap=WRAPS["linears"], **options)
    x, y = (tensor[share(rank)] for tensor in batch(0, ranks, device))
    before = model.gather_full_parameters()
    output = model(x if exact else x.float())
    assert output.dtype == (torch.float64 if exact else torch.bfloat16)
    (output.double() - y).square().mean().backward()
    model.finish_gradient_synchronization()
    assert all(p.dtype == p.grad.dtype == (torch.float64 if exact else torch.float32) for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = model.gather_full_parameters()
    return {key: (before[key] - after[key]).double().cpu() for key in before}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["reduced_in_bfloat16", "reduced_in_float32"])
def test_low_precision_errs_no_more_than_twice_as_much_as_fsdp2(
    world: World, reduce_dtype: torch.dtype | None, device: str
) -> None:
    exact, ours, theirs = (
        world.run(mixed_precision_on_rank, name, device, reduce_dtype)[0] for name in ("float64", "sharded", "fsdp2")
    )
    # The largest of all, as one small tensor's own is luck.
    error, allowed = (max((other[k] - exact[k]).norm() / exact[k].norm() for k in exact) for other in (ours, theirs))
    assert 0 < error <= 2 * allowed, f"{error} against {allowed} of FSDP2"


class Blocks(nn.Module):
    """Four blocks that `impl.checkpointing` can checkpoint."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)).to(dtype) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> the same."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


def checkpointed_on_rank(name: str, device: str) -> None:
    """Units in checkpointed blocks, and checkpointed blocks that are units; checkpointed before and after sharding."""
    x = torch.ones(3, DIM, dtype=torch.float64, device=device)
    torch.manual_seed(0)
    plain = Blocks().to(device)
    plain(x).sum().backward()
    policy = family("checkpointing").implementations[name].target
    for wrap in (by_type(nn.Linear), by_type(nn.Sequential), whole):
        for checkpoint_first in (True, False):
            module = Blocks().to(device)
            module.load_state_dict(plain.state_dict())
            model = FullyShardedDataParallel(policy(module) if checkpoint_first else module, wrap=wrap)
            if not checkpoint_first:
                policy(model.module)
            for _ in range(2):  # the second step gathers ahead
                model.zero_grad()
                model(x).sum().backward()
                model.finish_gradient_synchronization()
            assert all(not flat.gathered for unit in model.units for flat in unit.flats)
            before = model.gather_full_parameters()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            for key, value in model.gather_full_parameters().items():
                gradient = plain.get_parameter(key).grad
                torch.testing.assert_close(before[key] - value, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["full", "selective"])
def test_activation_checkpointing_within_and_around_units_changes_nothing(world: World, name: str, device: str) -> None:
    world.run(checkpointed_on_rank, name, device)


class Mixed(nn.Module):
    """Parameters of two dtypes, one without elements for most ranks, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float32))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 1)."""
        return self.layer(x) * self.scale


def odd_ones_on_rank(device: str) -> None:
    """Mixed dtypes, shards without elements, an optimizer that was there first, and evaluation in between."""
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
            m(x)  # what this has gathered is of before the step
            optimizer.step()
    assert torch.equal(module.unused.grad, torch.zeros_like(module.unused))
    for name, full in model.gather_full_parameters().items():
        torch.testing.assert_close(full, plain.state_dict()[name])


def test_dtypes_mix_shards_may_be_empty_and_the_optimizer_may_come_first(world: World, device: str) -> None:
    world.run(odd_ones_on_rank, device)


def wrong_uses_on_rank(device: str) -> list[str]:
    """What is said on this rank of each wrong use; every rank makes the same mistake or meets the same one."""
    last = dist.get_rank() == dist.get_world_size() - 1
    said = []

    def attempt(function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    attempt(FullyShardedDataParallel, nn.Sequential(nn.Linear(4, 5 if last else 4)).to(device))
    attempt(FullyShardedDataParallel, nn.Linear(4, 4).requires_grad_(False).to(device))
    model = FullyShardedDataParallel(nn.Linear(4, 4).to(device))
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 4, device=device)).sum().backward()
    attempt(optimizer.step)
    attempt(torch.optim.SGD([nn.Parameter(torch.ones(1))]).step)  # another's is its own affair
    model.finish_gradient_synchronization()
    attempt(optimizer.step)
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), compute_dtype=torch.int32)
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), forward_prefetch=-1)
    attempt(FullyShardedDataParallel, nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), wrap=by_type(nn.ModuleList))
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), wrap=lambda module: [nn.Linear(1, 1)])
    with torch.device("meta"):
        attempt(FullyShardedDataParallel, Mixed())
    return said


def test_wrong_uses_are_one_line_on_every_rank(world: World, device: str) -> None:
    for said in world.run(wrong_uses_on_rank, device):
        differ, *rest = said
        assert world.size == 1 or differ.startswith("ValueError: the ranks' modules differ at '0.weight'")
        for line, wanted in zip(
            rest,
            [
                "ValueError: Linear has no trainable parameters",
                "RuntimeError: optimizer.step() before finish_gradient_synchronization()",
                "nothing",
                "nothing",
                "ValueError: compute_dtype is a floating-point dtype or None, got torch.int32",
                "ValueError: forward_prefetch is how many units to gather ahead, from 0 on, got -1",
                "ValueError: a ModuleList has no forward, so it cannot be a unit",
                "ValueError: the wrapping policy chose a Linear that is not part of the module",
                "ValueError: a Mixed on the meta device has no reset_parameters()",
            ],
            strict=True,
        ):
            assert line.startswith(wanted) and "\n" not in line


def let_go_on_rank(device: str) -> bool:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device))
    model(torch.ones(1, 4, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    parameters = [weakref.ref(p) for p in (*model.parameters(), *model.units[1].flats[0].full)]
    del model
    gc.collect()
    return all(parameter() is None for parameter in parameters)


def test_a_model_that_is_let_go_frees_its_parameters(world: World, device: str) -> None:
    assert all(world.run(let_go_on_rank, device))


def made_from_meta_on_rank(device: str) -> tuple[int, int, int, list[str], list[float]]:
    """Peak and end in bytes of a model made real unit by unit, its whole size, and what came of it."""
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
    return memory.peak, memory.phases["made"], 4 * size.parameters, names, weights


def test_a_meta_module_is_made_unit_by_unit_and_never_held_whole(world: World, device: str) -> None:
    ranks = world.run(made_from_meta_on_rank, device)
    block = 4 * (2 * 64 * 256 + 256 + 64)
    for peak, made, whole_size, left_on_meta, (embedding, linear, norm) in ranks:
        assert not left_on_meta
        assert whole_size // world.size <= made <= whole_size // world.size + 1024
        # The last block has its values, and the flat tensor that they are sent in, from which the shard is cut.
        assert peak <= made + 2 * block + block // world.size + 1024
        if world.size > 1:
            assert peak < 0.9 * whole_size
        assert (embedding, norm) == (pytest.approx(1, rel=0.1), 0) and 0 < linear < 0.1
        assert ranks[0][4] == [embedding, linear, norm]


def test_policies_choose_units() -> None:
    model = MLPLanguageModel(MLPSize(4, 2, vocab=8))
    types = by_type(MLPBlock, nn.Linear)(model)
    assert types == [*model.blocks, model.output]
    assert by_type(nn.Linear)(model) == [b for block in model.blocks for b in (block.w1, block.w2)] + [model.output]
    assert by_size(70)(model) == [model.blocks[0].w1, model.blocks[1].w1]
    assert by_size(100)(model) == [*model.blocks]
    assert whole(model) == []
    for wrong in (lambda: by_type(), lambda: by_type(3), lambda: by_size(0)):
        with pytest.raises(ValueError, match="takes"):
            wrong()


def test_units_are_foretold_in_the_order_of_the_step_before() -> None:
    _, second, third = units = [object() for _ in range(3)]
    order = Order(depth=2)
    assert [order.next_after(unit) for unit in units] == [[], [], []]
    order.begin()
    assert [order.next_after(unit) for unit in units] == [[second, third], [third], []]
    order.begin()
    assert order.next_after(third) == [], "a step unlike the last foretells nothing"
