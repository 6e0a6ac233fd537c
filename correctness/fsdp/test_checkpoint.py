"""Checkpoints of a sharded model: exact to the bit on any number of ranks, complete or not there at all."""

import os
import random
import signal
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from correctness.support.whole_batch import DIM, MODULES, adam, batch, loss, module
from impl.fsdp import FullyShardedDataParallel, by_size, by_type
from impl.fsdp.checkpoint import load, save
from impl.fsdp.checkpoint_boxes import SavePlanner, boxes
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import RankError, World


def _train(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, steps: range, device: str) -> None:
    """Train every rank on the same batch, so all rank counts agree up to rounding."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, *batch(step, 1, device)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


def _state(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.gather_full_parameters().items()}


def save_on_rank(directory: Path, name: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters at the save and one step later."""
    model = FullyShardedDataParallel(module(name, 0, device), wrap=by_type(nn.Linear))
    optimizer = adam(model)
    _train(model, optimizer, range(2), device)
    save(directory, model, optimizer)
    saved = _state(model)
    _train(model, optimizer, range(2, 4), device)
    return saved, _state(model)


def load_on_rank(directory: Path, name: str, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Load into a model with other weights and units and a new optimizer. Return the state, the state one step later,
    and the learning rate."""
    model = FullyShardedDataParallel(module(name, 1, device), wrap=by_size(100))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.5)
    load(directory, model, optimizer)
    loaded = _state(model)
    _train(model, optimizer, range(2, 4), device)
    return loaded, _state(model), optimizer.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which the last load asks for
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tied_and_frozen" else pytest.mark.sweep) for name in MODULES]
)
def test_what_two_ranks_save_one_three_and_four_load_to_the_bit(
    worlds: WorldsBySize, name: str, tmp_path: Path, device: str
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
    """Load into optimizers that differ from the saved one; return the errors. A reordered optimizer is loaded by
    parameter."""
    model = FullyShardedDataParallel(module("plain", 0, device))
    optimizer = adam(model)
    _train(model, optimizer, range(1), device)
    save(directory, model, optimizer)

    parameters = list(model.parameters())
    turned = torch.optim.Adam(parameters[::-1])
    load(directory, model, turned)
    for p in parameters:
        assert torch.equal(turned.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])

    errors = []
    others = (
        torch.optim.Adam(parameters[1:]),
        torch.optim.SGD(parameters),
        torch.optim.Adam([{"params": [p]} for p in parameters]),
    )
    for other in others:
        try:
            load(directory, model, other)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_moments_go_to_their_own_parameters_and_those_of_another_optimizer_nowhere(
    worlds: WorldsBySize, tmp_path: Path, device: str
) -> None:
    for errors in worlds(2).run(other_optimizers_on_rank, tmp_path / "checkpoint", device):
        fewer, sgd, groups = (line.partition("is of another optimizer: ")[2] for line in errors)
        assert fewer.startswith("group 0 has the parameter ") and fewer.endswith(" only there")
        assert sgd.startswith("group 0 has the setting ")
        assert groups.startswith("1 parameter groups there and ")


def _error(function: Callable[..., None], *args: object) -> str:
    """Return the one-line error of a call that fails on all ranks or on none."""
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        line = str(error)
        assert "\n" not in line, line
        return line
    return "nothing"


def wrong_checkpoints_on_rank(directory: Path, device: str) -> list[str]:
    """Return the errors for directories that cannot be used."""
    model = FullyShardedDataParallel(module("plain", 0, device))
    optimizer, whole = adam(model), directory / "whole"
    x = batch(0, 1, device)[0].requires_grad_()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()  # what is saved below is valid all the same
    errors = [
        _error(load, directory / "nowhere", model),
        _error(save, whole, model),
        _error(save, whole, model),
        _error(load, whole, model, optimizer),
        _error(load, whole, FullyShardedDataParallel(nn.Linear(DIM, 2).to(device))),
        _error(load, whole, FullyShardedDataParallel(module("plain", 0, device).float())),
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # so that a load that changes anything shows
    before, last = _state(model), max(whole.glob("*.distcp"))
    if dist.get_rank() == 0:
        last.write_bytes(bytes(last.stat().st_size))
    dist.barrier()
    errors.append(_error(load, whole, model))
    dist.barrier()
    if dist.get_rank() == 0:
        last.write_bytes(last.read_bytes()[:-100])
    dist.barrier()
    with torch.no_grad():
        errors.append(_error(load, whole, model))
    dist.barrier()
    if dist.get_rank() == 0:
        (whole / ".metadata").write_bytes(b"")
    dist.barrier()
    errors.append(_error(load, whole, model))
    optimizer.state[next(model.parameters())] = {"step": 1}
    errors.append(_error(save, directory / "counted", model, optimizer))
    assert all(torch.equal(before[key], value) for key, value in _state(model).items())
    return errors


def test_directories_that_cannot_be_used_are_one_line(worlds: WorldsBySize, tmp_path: Path, device: str) -> None:
    for errors in worlds(2).run(wrong_checkpoints_on_rank, tmp_path, device):
        nowhere, saved, again, no_optimizer, other, dtype, damaged, cut, empty, counted = errors
        assert nowhere.endswith("nowhere holds no complete checkpoint: it has no .metadata")
        assert saved == "nothing"
        assert again.endswith("whole exists already, and a checkpoint is written once")
        assert no_optimizer.endswith("whole holds no optimizer's state")
        assert other.endswith(f"is of another model: 'weight' is missing there and (2, {DIM}) of torch.float32 here")
        assert f"'0.weight' is (20, {DIM}) of torch.float64 there and (20, {DIM}) of torch.float32 here" in dtype
        assert "whole cannot be read: " in damaged and "(on rank " in damaged
        assert "holds no complete checkpoint" in cut and cut.endswith("is missing or cut off")
        assert empty.endswith("whole holds no complete checkpoint: its .metadata cannot be read")
        assert counted.startswith("the optimizer's state 'step' of '0.weight' is of type int, and tensors alone are")


def alone_on_rank(directory: Path, device: str) -> list[str]:
    """Return the errors where rank 1 alone sees other files or fails; each rank's directory stands for its own
    machine."""
    rank = dist.get_rank()
    model = FullyShardedDataParallel(module("plain", 0, device))
    optimizer, own = adam(model), directory / f"{rank}"
    if rank == 1:
        (own / "there").mkdir(parents=True)
    errors = [_error(save, own / "there", model), _error(save, own / "apart", model)]
    _train(model, optimizer, range(1), device)
    save(directory / "whole", model, optimizer)
    errors.append(_error(load, directory / "whole" if rank == 0 else own, model, optimizer))
    stranger = torch.optim.Adam([nn.Parameter(torch.ones(1))]) if rank == 1 else optimizer
    errors.append(_error(load, directory / "whole", model, stranger))
    errors.append(_error(save, directory / "stranger", model, stranger))
    dist.barrier()
    return [
        *errors,
        " ".join(str(path.relative_to(directory)) for path in sorted(directory.rglob("*/")) if path.is_dir()),
    ]


def test_what_one_rank_alone_sees_is_the_same_line_on_all(worlds: WorldsBySize, tmp_path: Path, device: str) -> None:
    for there, apart, not_there, *stranger, folders in worlds(2).run(alone_on_rank, tmp_path, device):
        assert there.endswith("/1/there exists already, and a checkpoint is written once (on rank 1 of 2)")
        assert apart.endswith(
            "/1 is not one directory for all ranks: what rank 0 made there is not to be seen (on rank 1 of 2)"
        )
        assert not_there.endswith("/1 holds no complete checkpoint: it has no .metadata (on rank 1 of 2)")
        other = "the optimizer has a parameter of shape (1,) that is not the model's (on rank 1 of 2)"
        assert stranger == [other, other]
        assert folders == "0 1 1/there whole"


def fail_on_rank_1(directory: Path, device: str) -> list[str]:
    """Let a save fail while rank 1 writes; return the files left and the type of each error."""
    model = FullyShardedDataParallel(module("plain", 0, device))
    look_up, left = SavePlanner.lookup_object, []
    for kind in (OSError, KeyboardInterrupt):

        def fail(planner: SavePlanner, index: object, kind: type[BaseException] = kind) -> object:
            if dist.get_rank() == 1:
                raise kind("no space left on device")
            return look_up(planner, index)

        SavePlanner.lookup_object = fail  # type: ignore[method-assign]
        try:
            with pytest.raises(
                RuntimeError, match=f"half cannot be written: {kind.__name__}: no space .* \\(on rank 1\\)$"
            ):
                save(directory / "half", model)
        finally:
            SavePlanner.lookup_object = look_up  # type: ignore[method-assign]
        dist.barrier()
        left += [path.name for path in directory.iterdir()]
    return left


def killed_on_rank(directory: Path, device: str) -> None:
    """Kill this process halfway through a save, as a power cut would: its file is written, and the save not yet
    whole."""
    os.fsync = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    save(directory / "whole", FullyShardedDataParallel(module("plain", 0, device)))


def test_a_save_that_fails_leaves_nothing_and_one_that_is_killed_what_the_next_removes(
    pair: World, worlds: WorldsBySize, tmp_path: Path, device: str
) -> None:
    assert pair.run(fail_on_rank_1, tmp_path, device) == [[], []]
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        pair.run(killed_on_rank, tmp_path, device)
    partial = tmp_path / "whole.partial"
    assert list(partial.iterdir()), "what was written so far"
    (partial / "stale").touch()
    worlds(2).run(save_on_rank, tmp_path / "whole", "plain", device)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert not (tmp_path / "whole" / "stale").exists()


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
