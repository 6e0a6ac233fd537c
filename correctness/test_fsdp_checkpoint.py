"""Checkpoints of a sharded model: for any number of ranks, to the bit, whole or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from correctness.whole_batch import DIM, MODULES, adam, batch, loss, module
from impl.fsdp import FullyShardedDataParallel, by_size, by_type
from impl.fsdp import checkpoint as checkpoints
from impl.fsdp.checkpoint import boxes, load, save
from shardmark.world import World


def _train(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, steps: range, device: str) -> None:
    """Every rank on the same batch, so that all rank counts do the same but for rounding."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, *batch(step, 1, device)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


def _state(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.gather_full_parameters().items()}


def save_on_rank(directory: Path, name: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters when they are saved, and one step later."""
    model = FullyShardedDataParallel(module(name, 0, device), wrap=by_type(nn.Linear))
    optimizer = adam(model)
    _train(model, optimizer, range(2), device)
    save(directory, model, optimizer)
    saved = _state(model)
    _train(model, optimizer, range(2, 4), device)
    return saved, _state(model)


def load_on_rank(directory: Path, name: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The same of a model that has other weights, other units and a new optimizer, and its learning rate."""
    model = FullyShardedDataParallel(module(name, 1, device), wrap=by_size(100))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.5)
    load(directory, model, optimizer)
    loaded = _state(model)
    _train(model, optimizer, range(2, 4), device)
    return loaded, _state(model), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", MODULES)
def test_what_two_ranks_save_one_three_and_four_load_to_the_bit(
    worlds: Callable[[int], World], name: str, tmp_path: Path, device: str
) -> None:
    directory = tmp_path / "checkpoint"
    saved, after = worlds(2).run(save_on_rank, directory, name, device)[0]
    for ranks in (1, 3, 4):
        loaded, continued, lr = worlds(ranks).run(load_on_rank, directory, name, device)[0]
        assert lr == 0.01
        for key in saved:
            assert torch.equal(loaded[key], saved[key])
            torch.testing.assert_close(continued[key], after[key], rtol=1e-12, atol=1e-12)
    plain = module(name, 2, "cpu")
    state = {key: plain.state_dict()[key] for key in saved if key in dict(plain.named_parameters())}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    assert all(torch.equal(state[key], saved[key]) for key in state), "names and shapes are the module's own"


def other_optimizers_on_rank(directory: Path, device: str) -> list[str]:
    """What is said of optimizers that are not the saved one; one of another order is loaded parameter by parameter."""
    model = FullyShardedDataParallel(module("plain", 0, device))
    optimizer = adam(model)
    _train(model, optimizer, range(1), device)
    save(directory, model, optimizer)

    parameters = list(model.parameters())
    turned = torch.optim.Adam(parameters[::-1])
    load(directory, model, turned)
    for p in parameters:
        assert torch.equal(turned.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])

    said = []
    others = (
        torch.optim.Adam(parameters[1:]),
        torch.optim.SGD(parameters),
        torch.optim.Adam([{"params": [p]} for p in parameters]),
    )
    for other in others:
        try:
            load(directory, model, other)
        except ValueError as error:
            said.append(str(error))
    return said


def test_moments_go_to_their_own_parameters_and_those_of_another_optimizer_nowhere(
    worlds: Callable[[int], World], tmp_path: Path, device: str
) -> None:
    for said in worlds(2).run(other_optimizers_on_rank, tmp_path / "checkpoint", device):
        fewer, sgd, groups = (line.partition("is of another optimizer: ")[2] for line in said)
        assert fewer.startswith("group 0 has the parameter ") and fewer.endswith(" only there")
        assert sgd.startswith("group 0 has the setting ")
        assert groups.startswith("1 parameter groups there and ")


def wrong_checkpoints_on_rank(directory: Path, device: str) -> list[str]:
    """What is said of directories that cannot be used, and of a save that fails halfway."""
    model = FullyShardedDataParallel(module("plain", 0, device))
    optimizer = adam(model)
    said = []

    def attempt(function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        dist.barrier()

    attempt(load, directory / "nowhere", model)
    attempt(save, directory / "whole", model)
    attempt(save, directory / "whole", model)
    attempt(load, directory / "whole", model, optimizer)
    attempt(load, directory / "whole", FullyShardedDataParallel(nn.Linear(DIM, 2).to(device)))
    before = _state(model)
    if dist.get_rank() == 0:
        file = next((directory / "whole").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier()
    with torch.no_grad():
        attempt(load, directory / "whole", model)
    assert all(torch.equal(before[key], value) for key, value in _state(model).items())

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    look_up, checkpoints._Save.lookup_object = checkpoints._Save.lookup_object, fail  # type: ignore[method-assign]
    try:
        save(directory / "half", model)
    except dcp.api.CheckpointException:
        said.append("failed")
    finally:
        checkpoints._Save.lookup_object = look_up  # type: ignore[method-assign]
    dist.barrier()
    return [*said, *sorted(path.name for path in directory.iterdir())]


def test_directories_that_cannot_be_used_are_one_line_and_nothing_is_half_written(
    worlds: Callable[[int], World], tmp_path: Path, device: str
) -> None:
    for said in worlds(2).run(wrong_checkpoints_on_rank, tmp_path, device):
        assert all("\n" not in line for line in said)
        nowhere, saved, again, no_optimizer, other, cut, failed, *files = said
        assert nowhere.endswith("nowhere holds no complete checkpoint: it has no .metadata")
        assert saved == "nothing"
        assert again.endswith("whole exists already, and a checkpoint is written once")
        assert no_optimizer.endswith("whole holds no optimizer's state")
        assert other.endswith(f"is of another model: 'weight' is missing there and (2, {DIM}) here")
        assert "holds no complete checkpoint" in cut and cut.endswith("is missing or cut off")
        assert failed == "failed" and files == ["whole"]


def test_boxes_are_the_elements_in_order() -> None:
    for _ in range(300):
        shape = tuple(random.choices([1, 2, 3, 4], k=random.randint(0, 4)))
        begin, end = sorted(random.choices(range(prod(shape) + 1), k=2))
        whole = torch.arange(prod(shape)).view(shape)
        found = [whole[tuple(map(_span, offsets, sizes))].flatten() for offsets, sizes in boxes(shape, begin, end)]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(begin, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def _span(offset: int, size: int) -> slice:
    return slice(offset, offset + size)
