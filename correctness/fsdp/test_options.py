"""Every way to shard everything against one process that has the whole model and the whole batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.whole_batch import (
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
from impl.fsdp import by_size, by_type, whole
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


@pytest.mark.family("fsdp", only=(*OURS, "simple", "fsdp1", "fsdp2"))
def test_gradients_are_the_shards_own_and_are_clipped_by_the_norm_over_all_ranks(
    implementation: Implementation, world: World, device: str
) -> None:
    world.run(contract_on_rank, implementation, device)


def shard_again(implementation: Implementation, device: str) -> list[str]:
    """What is said of the wrapper wrapped, and of the module whose parameters it took."""
    plain = nn.Sequential(nn.Linear(4, 4)).to(device)
    model = _wrap(implementation, plain, wrap=whole)
    said = []
    for again in (model, plain):
        with pytest.raises(ValueError, match="already") as error:
            _wrap(implementation, again)
        said.append(str(error.value))
    return said


@pytest.mark.family("fsdp", only=("sharded", "simple", "fsdp1", "fsdp2"))
def test_to_wrap_twice_is_one_line(implementation: Implementation, world: World, device: str) -> None:
    for said in world.run(shard_again, implementation, device):
        assert len(said) == 2
        for line in said:
            assert re.fullmatch(
                r"this \w+ is sharded over ranks already(, at '[\w.]+')?: give it an unsharded module", line
            )


def wrap_without_parameters(implementation: Implementation) -> None:
    with pytest.raises(
        ValueError, match=r"^Sequential has no trainable parameters, so there is no gradient to average$"
    ):
        _wrap(implementation, nn.Sequential(nn.ReLU()))


@pytest.mark.family("fsdp", only=("sharded", "simple", "fsdp1", "fsdp2"))
def test_a_module_without_parameters_is_one_line(implementation: Implementation, world: World) -> None:
    world.run(wrap_without_parameters, implementation)


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
