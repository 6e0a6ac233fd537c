"""Parameters that every rank keeps in full: equal on all ranks, with averaged gradients, never gathered."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.fsdp.checks import (
    LINEARS,
    Odd,
    SGDs,
    as_expected,
    assert_none,
    both,
    full,
    gradients_as_expected,
    on_every_rank,
    synchronized_backward,
    whole_backward,
    wrap,
)
from correctness.support.communication import recorded
from correctness.support.whole_batch import (
    DIM,
    ONE_MODULE,
    adam,
    assert_equal_states,
    error_line,
    module,
    single_process,
    train,
)
from impl.fsdp import FullyShardedDataParallel, by_type, norms_and_biases
from impl.fsdp.checkpoint import load, save
from impl.model.mlp import MLPBlock, MLPLanguageModel, MLPSize
from shardmark.api import Implementation
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import World

OPTIONS: dict[str, Any] = {"wrap": LINEARS, "ignored_params": norms_and_biases}


def every_second(module: nn.Module) -> list[nn.Parameter]:
    """Pick every second parameter: any shape, trainable or frozen, tied or not."""
    return [*module.parameters()][::2]


POLICIES = {"norms_and_biases": norms_and_biases, "every_second": every_second}


def train_on_rank(implementation: Implementation, name: str, policy: str, device: str) -> dict[str, Tensor]:
    """Return the full final state, with each ignored parameter as this rank has it."""
    plain = module(name, dist.get_rank(), device)
    shapes = {key: p.shape for key, p in plain.named_parameters()}
    ignored = [key for key, p in plain.named_parameters() if any(p is q for q in POLICIES[policy](plain))]
    model = wrap(implementation, plain, **OPTIONS | {"ignored_params": POLICIES[policy]})
    train(model, adam(model), device, model.finish_gradient_synchronization)
    own = {key: p.detach() for key, p in model.module.named_parameters() if key in ignored}
    assert {key: p.shape for key, p in own.items()} == {key: shapes[key] for key in ignored}
    plain = module(name, 0, device)
    found = dict(plain.named_buffers()) | full(model) | own
    return {name: found[name].cpu() for name in plain.state_dict()}


@pytest.mark.family("fsdp", option="ignored_params")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ONE_MODULE)
def test_replicated_parameters_train_as_in_a_single_process(
    implementation: Implementation, world: World, name: str, policy: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, name, policy, device)
    assert_equal_states(ranks, single_process(name, world.size, device))


@pytest.mark.family("fsdp", option="ignored_params")
@on_every_rank
def test_a_gradient_that_every_rank_has_counts_once_in_the_norm(implementation: Implementation, device: str) -> str:
    model, plain = both(implementation, Odd, device, **OPTIONS)
    whole_backward(plain, 0, device)
    synchronized_backward(model, 0, device)
    norm = model.clip_grad_norm_(0.05).cpu()
    problem = as_expected("the returned", {"norm": norm}, {"norm": nn.utils.clip_grad_norm_(plain.parameters(), 0.05)})
    return problem or gradients_as_expected("clipped, the gradient of", model, plain)


def communicated_on_rank(implementation: Implementation, dtype: torch.dtype | None, device: str) -> list[str]:
    """Return the messages of a step of a model with two linears whose weights are sharded."""
    model = nn.Sequential(nn.Linear(DIM, 6), nn.LayerNorm(6), nn.Linear(6, 6)).to(device)
    model = wrap(implementation, model, compute_dtype=dtype, **OPTIONS)
    optimizer = SGDs(model)
    with recorded() as sent:
        model(torch.ones(2, DIM, device=device)).sum().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    # without the messages inside ring collectives
    return [str(each) for each in sent if each.name not in ("send", "receive")]


@pytest.mark.family("fsdp", option="ignored_params", only=("sharded",))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_all_reduces_them_together_and_once(
    implementation: Implementation, world: World, dtype: torch.dtype | None, device: str
) -> None:
    for sent in world.run(communicated_on_rank, implementation, dtype, device):
        name = str(dtype or torch.float32).removeprefix("torch.")
        nbytes = (dtype or torch.float32).itemsize * 4 * 6  # two biases, and the norm's weight and bias
        reduced = [each for each in sent if each.startswith("all_reduce")]
        assert reduced == [f"all_reduce of {nbytes} bytes of {name} on {world.size} ranks"]


def save_on_rank(directory: Path, device: str) -> dict[str, Tensor]:
    model = FullyShardedDataParallel(module("plain", 0, device), **OPTIONS)
    optimizer = adam(model)
    synchronized_backward(model, 0, device)
    optimizer.step()
    save(directory, model, optimizer)
    return full(model)


def load_on_rank(directory: Path, device: str, replicated: bool) -> dict[str, Tensor]:
    model = FullyShardedDataParallel(module("plain", 1, device), **(OPTIONS if replicated else {}))
    optimizer = adam(model)
    load(directory, model, optimizer)
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    return full(model)


def test_a_checkpoint_does_not_say_what_was_replicated(worlds: WorldsBySize, tmp_path: Path, device: str) -> None:
    saved = worlds(2).run(save_on_rank, tmp_path / "it", device)[0]
    for replicated in (True, False):
        for loaded in worlds(3).run(load_on_rank, tmp_path / "it", device, replicated):
            assert_none([as_expected("the loaded", loaded, saved, tolerance=0)])


def made_from_meta_on_rank(device: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = MLPLanguageModel(MLPSize(8, 2, vocab=32))
    names = [name for name, p in module.named_parameters() if p.ndim < 2]
    FullyShardedDataParallel(module, wrap=by_type(MLPBlock), ignored_params=norms_and_biases, device=device)
    return {name: module.get_parameter(name).detach().cpu() for name in names}


def test_what_was_on_meta_is_replicated_as_well(world: World, device: str) -> None:
    first, *others = world.run(made_from_meta_on_rank, device)
    assert first["blocks.1.w1.bias"].shape == (32,) and first["blocks.1.w1.bias"].unique().numel() == 32
    assert_none([as_expected("rank 0's", other, first, tolerance=0) for other in others])


def refused_on_rank() -> str:
    foreign = [nn.Parameter(torch.ones(1))]
    return error_line(ValueError, lambda: FullyShardedDataParallel(nn.Linear(4, 4), ignored_params=lambda _: foreign))


def test_a_parameter_of_another_module_is_one_line(world: World) -> None:
    for line in world.run(refused_on_rank):
        assert line == "ignored_params chose 1 of 1 that are not parameters of the module"
