"""Options and error messages of our own implementations, beyond the contract; units and their prefetch order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from correctness.fsdp.checks import LINEARS, Odd, trained
from correctness.support.whole_batch import ONE_MODULE, assert_equal_states, single_process
from impl.fsdp import FullyShardedDataParallel, by_size, by_type, whole
from impl.fsdp.checkpoint import load, save
from impl.fsdp.flat_parameters import Sharding
from impl.fsdp.prefetch_order import Order
from impl.model.mlp import MLPBlock, MLPLanguageModel, MLPSize
from shardmark.api.registry import Implementation, check_contract, family
from shardmark.ranks.world import World

OURS = ("sharded_plain", "sharded", "sharded_kept")
OPTIONS: dict[str, dict[str, Any]] = {
    "by_size": {"wrap": by_size(100)},
    "whole": {"wrap": whole},
    "two_ahead": {"forward_prefetch": 2, "backward_prefetch": 2},
    "kept_two_ahead": {"forward_prefetch": 2, "backward_prefetch": 0, "reshard_after_forward": False},
    "offloaded": {"cpu_offload": True},
}


def train_on_rank(implementation: Implementation, name: str, device: str, option: str) -> dict[str, Tensor]:
    return trained(implementation, name, device, **OPTIONS[option])


@pytest.mark.family("fsdp", only=OURS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ONE_MODULE)
def test_every_option_gives_the_same(
    implementation: Implementation, world: World, name: str, option: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, option)
    assert_equal_states(ranks, single_process(name, world.size, device))


class Listening(TorchFunctionMode):
    """Records each pin_memory call and each copy, and if the host waits for the copy; pins nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            self.heard.append("pin")
            return args[0]
        if "non_blocking" in kwargs:
            self.heard.append(f"{function.__name__}{'' if kwargs['non_blocking'] else ' and wait'}")
        return function(*args, **kwargs)

    def synchronize(self) -> None:
        self.heard.append("wait")

    def since(self) -> list[str]:
        """Return what was recorded since the last call."""
        heard, self.heard = self.heard, []
        return heard


def offload_as_from_an_accelerator(device: str) -> dict[str, list[str]]:
    """List the copies in each part of two steps, on a CPU that passes for an accelerator."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, Listening() as listening:
        patch.setattr(Sharding, "offloads", True)
        patch.setattr(torch.accelerator, "current_stream", lambda device: listening)
        model = FullyShardedDataParallel(nn.Linear(4, 4).to(device), cpu_offload=True)
        found["wrap"] = listening.since()
        for step in ("first", "added"):
            output = model(torch.ones(2, 4, device=device))
            found[f"{step} forward"] = listening.since()
            output.sum().backward()
            found[f"{step} backward"] = listening.since()
            model.finish_gradient_synchronization()
            found[f"{step} finish"] = listening.since()
        with torch.no_grad():
            model(torch.ones(2, 4, device=device))
        found["evaluation"] = listening.since()
    return found


def test_offloaded_shards_are_pinned_and_copies_are_waited_for_before_the_optimizer(world: World, device: str) -> None:
    """CUDA overlaps copies with computation only from and to pinned memory; data must have arrived before the host
    reads it."""
    for found in world.run(offload_as_from_an_accelerator, device):
        assert found == {
            "wrap": ["pin"],
            "first forward": ["copy_"],
            "first backward": [],
            "first finish": ["to", "wait"],
            "added forward": ["copy_"],
            "added backward": [],
            "added finish": ["to and wait", "wait"],
            "evaluation": ["copy_", "wait"],
        }


class Writing(Listening):
    """Records each write to the memory of `written` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_ and args[0].untyped_storage().data_ptr() in self.written:
            self.heard.append("write")
        return super().__torch_function__(function, types, args, kwargs)


def load_after_forward(directory: Path, device: str) -> dict[str, list[str]]:
    """Load shards while forward may still copy from them; return the waits and writes recorded."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, Writing() as listening:
        patch.setattr(Sharding, "offloads", True)
        patch.setattr(torch.accelerator, "current_stream", lambda device: listening)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4).to(device)), cpu_offload=True)
        listening.written = {p.untyped_storage().data_ptr() for p in model.parameters()}
        save(directory, model)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        part = {name.removeprefix("0."): tensor for name, tensor in state.items()}
        ways = {
            "state": lambda: model.load_state_dict(state),
            "part": lambda: model.module[0].load_state_dict(part),
            "checkpoint": lambda: load(directory, model),
        }
        for name, way in ways.items():
            model(torch.ones(2, 4, device=device))
            listening.since()
            way()
            found[name] = list(dict.fromkeys(listening.since()))
    return found


def test_offloaded_shards_are_loaded_once_forward_has_copied_them(world: World, tmp_path: Path, device: str) -> None:
    for found in world.run(load_after_forward, tmp_path / "it", device):
        assert found == {way: ["wait", "write"] for way in ("state", "part", "checkpoint")}


@pytest.mark.parametrize("name", family("fsdp").implementations)
def test_every_registered_implementation_may_be_named_by_a_user(name: str) -> None:
    """Registered `functools.partial` objects too."""
    entry = family("fsdp").implementations[name]
    check_contract(entry, "cpu")


def wrong_uses_on_rank(device: str) -> list[str]:
    """Return the error of each wrong use on this rank; all ranks make the same mistake or get the same error."""
    said = []

    def attempt(function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    model = FullyShardedDataParallel(nn.Linear(4, 4).to(device))
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 4, device=device)).sum().backward()
    attempt(optimizer.step)
    attempt(model.clip_grad_norm_, 1.0)
    attempt(torch.optim.SGD([nn.Parameter(torch.ones(1))]).step)  # another model's optimizer may step
    model.finish_gradient_synchronization()
    attempt(optimizer.step)
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), compute_dtype=torch.int32)
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), forward_prefetch=-1)
    attempt(FullyShardedDataParallel, nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), wrap=by_type(nn.ModuleList))
    attempt(FullyShardedDataParallel, nn.Linear(4, 4), wrap=lambda module: [nn.Linear(1, 1)])
    with torch.device("meta"):
        attempt(FullyShardedDataParallel, Odd())
    return said


def test_wrong_uses_are_one_line_on_every_rank(world: World, device: str) -> None:
    for said in world.run(wrong_uses_on_rank, device):
        for line, wanted in zip(
            said,
            [
                "RuntimeError: optimizer.step() before finish_gradient_synchronization()",
                "RuntimeError: clip_grad_norm_() before finish_gradient_synchronization()",
                "nothing",
                "nothing",
                "ValueError: compute_dtype is a floating-point dtype or None, got torch.int32",
                "ValueError: forward_prefetch is how many units to prefetch, from 0 on, got -1",
                "ValueError: a ModuleList has no forward, so it cannot be a unit",
                "ValueError: the wrapping policy chose a Linear that is not part of the module",
                "ValueError: a Odd on the meta device has no reset_parameters()",
            ],
            strict=True,
        ):
            assert line.startswith(wanted) and "\n" not in line


def test_policies_choose_units() -> None:
    model = MLPLanguageModel(MLPSize(4, 2, vocab=8))
    types = by_type(MLPBlock, nn.Linear)(model)
    assert types == [*model.blocks, model.output]
    assert LINEARS(model) == [b for block in model.blocks for b in (block.w1, block.w2)] + [model.output]
    assert by_size(70)(model) == [model.blocks[0].w1, model.blocks[1].w1]
    assert by_size(100)(model) == [*model.blocks]
    assert whole(model) == []
    for wrong in (lambda: by_type(), lambda: by_type(3), lambda: by_size(0), lambda: by_size("a")):
        with pytest.raises(ValueError, match="takes"):
            wrong()


def test_units_are_prefetched_in_the_order_of_the_step_before() -> None:
    _, second, third = units = [object() for _ in range(3)]
    order = Order("forward_prefetch", 2)
    assert [order.next_after(unit) for unit in units] == [[], [], []]
    order.begin()
    assert [order.next_after(unit) for unit in units] == [[second, third], [third], []]
    order.begin()
    assert order.next_after(third) == [], "a step unlike the last predicts nothing"
