"""Optimizers made before their model was sharded, repaired or not, against a single process."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from correctness.support.waiting import are_freed
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
from impl.fsdp.optimizer_order import rewire
from shardmark.ranks.world import World


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rows: slice, device: str) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = (tensor[rows] for tensor in batch(step, dist.get_world_size(), device))
        loss(model, x, y).backward()
        optimizer.step()


def _mesh(device: str) -> DeviceMesh:
    """All ranks; on a machine with a GPU `fully_shard` would take that by default, whatever the model is on."""
    return init_device_mesh(device, (dist.get_world_size(),))


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Gather the full state of a sharded model."""
    state = model.state_dict()
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu() for name, x in state.items()}


def train_sharded(name: str, device: str, unsharded_steps: int, repaired: bool) -> dict[str, Tensor]:
    """Train with an Adam that was made before sharding and has taken some steps on the whole batch."""
    model = module(name, 0, device)
    optimizer = adam(model)
    _steps(model, optimizer, range(unsharded_steps), slice(None), device)
    before = dict(model.named_parameters())
    fully_shard(model, mesh=_mesh(device))
    if repaired:
        rewire(optimizer, before, dict(model.named_parameters()))
    _steps(model, optimizer, range(unsharded_steps, STEPS), share(dist.get_rank()), device)
    return _whole(model)


@pytest.mark.parametrize("unsharded_steps", [0, STEPS // 2], ids=["without_state", "with_state"])
@pytest.mark.parametrize("name", MODULES)
def test_repaired_it_trains_as_a_single_process(world: World, name: str, unsharded_steps: int, device: str) -> None:
    ranks = world.run(train_sharded, name, device, unsharded_steps, True)
    assert_equal_states(ranks, single_process(name, world.size, device))


def test_unrepaired_nothing_trains(world: World, device: str) -> None:
    initial = {name: x.cpu() for name, x in module("plain", 0, device).state_dict().items()}
    for rank in world.run(train_sharded, "plain", device, 0, False):
        assert all(torch.equal(x, initial[name]) for name, x in rank.items())


def freed_by_repair(device: str) -> list[bool]:
    """Are the full parameters and moments freed: without the repair, and with it?"""
    gone = []
    for repaired in (False, True):
        model = module("plain", 0, device)
        optimizer = adam(model)
        _steps(model, optimizer, range(1), slice(None), device)
        before = dict(model.named_parameters())
        full = [weakref.ref(x) for p in before.values() for x in (p, optimizer.state[p]["exp_avg"])]
        fully_shard(model, mesh=_mesh(device))
        if repaired:
            rewire(optimizer, before, dict(model.named_parameters()))
        del before
        gone.append(are_freed(*full, seconds=10 if repaired else 0))
    return gone


def test_repair_frees_the_full_parameters_and_their_state(world: World, device: str) -> None:
    assert world.run(freed_by_repair, device) == [[False, True]] * world.size


def _model_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODULES["plain"]()
    optimizer = adam(model)
    loss(model, *(x.float() for x in batch(0, 1, "cpu"))).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape", "state"])
def test_what_cannot_be_repaired_is_one_line_and_changes_nothing(fault: str) -> None:
    model, optimizer = _model_and_adam()
    before = dict(model.named_parameters())
    after = {name: nn.Parameter(p.detach().clone()) for name, p in before.items()}
    match fault:
        case "unknown":
            before.pop("4.bias")
            said = r"the optimizer holds a parameter of shape \(12,\) that was not there before"
        case "missing":
            after.pop("4.bias")
            said = r"there is no parameter '4.bias' any more"
        case "shape":
            after["4.bias"] = nn.Parameter(torch.zeros(3))
            said = r"'4.bias' was of shape \(12,\) and is of \(3,\)"
        case "state":
            optimizer.state[before["4.bias"]]["exp_avg"] = torch.zeros(3)
            said = r"'exp_avg' of '4.bias' is of shape \(3,\) where the parameter has \(12,\), so"
    groups, state = copy.copy(optimizer.param_groups[0]["params"]), dict(optimizer.state)
    with pytest.raises(ValueError, match=said) as caught:
        rewire(optimizer, before, after)
    assert "\n" not in str(caught.value)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], groups, strict=True))
    assert all(optimizer.state[p] is state[p] for p in state) and len(state) == len(optimizer.state)
