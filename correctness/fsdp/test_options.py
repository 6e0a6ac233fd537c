"""Options and error messages of our own implementations, beyond the contract."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from correctness.fsdp.checks import backward, full, own_batch, wrap
from correctness.support.whole_batch import ONE_MODULE, STEPS, adam, assert_equal_states, module, single_process
from impl.fsdp import FullyShardedDataParallel, by_size, by_type, whole
from impl.fsdp.checkpoint import load, save
from impl.fsdp.flat_parameters import Sharding
from shardmark.api.registry import Implementation, check_contract, family
from shardmark.ranks.world import World

OURS = ("sharded_plain", "sharded", "sharded_kept")
WRAPS = {"by_size": by_size(100), "whole": whole}
LINEARS = by_type(nn.Linear)


def train_on_rank(implementation: Implementation, name: str, device: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the full final state, under the unwrapped module's names."""
    wrapping = WRAPS.get(options.get("wrap", ""), LINEARS)
    model = wrap(implementation, module(name, dist.get_rank(), device), **options | {"wrap": wrapping})
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, device)
        model.finish_gradient_synchronization()
        optimizer.step()
    plain = module(name, 0, device)
    found = dict(plain.named_buffers()) | full(model)
    return {name: found[name].cpu() for name in plain.state_dict()}


def _assert_equals_a_single_process(
    implementation: Implementation, world: World, name: str, device: str, **options: Any
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, options)
    assert_equal_states(ranks, single_process(name, world.size, device))


@pytest.mark.family("fsdp", only=OURS, option="wrap")
@pytest.mark.parametrize("units", WRAPS)
@pytest.mark.parametrize("name", ONE_MODULE)
def test_units_of_any_size_give_the_same(
    implementation: Implementation, world: World, name: str, units: str, device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, wrap=units)


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
@pytest.mark.parametrize("name", ONE_MODULE)
def test_every_option_gives_the_same(
    implementation: Implementation, world: World, name: str, options: dict[str, Any], device: str
) -> None:
    _assert_equals_a_single_process(implementation, world, name, device, **options)


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


def shard_again(implementation: Implementation, device: str) -> list[str]:
    """Return the errors of wrapping a wrapper, and of wrapping a module whose parameters are sharded already."""
    plain = nn.Sequential(nn.Linear(4, 4)).to(device)
    model = wrap(implementation, plain, wrap=whole)
    said = []
    for again in (model, plain):
        with pytest.raises(ValueError, match="already") as error:
            wrap(implementation, again)
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
        wrap(implementation, nn.Sequential(nn.ReLU()))


@pytest.mark.family("fsdp", only=("sharded", "simple", "fsdp1", "fsdp2"))
def test_a_module_without_parameters_is_one_line(implementation: Implementation, world: World) -> None:
    world.run(wrap_without_parameters, implementation)


def mixed_precision_on_rank(name: str, device: str, reduce_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Averaged gradients: of float32 parameters with bfloat16 compute, or of float64 as the reference."""
    exact = name == "float64"
    options: dict[str, Any] = {} if exact else {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    entry = family("fsdp").implementations["sharded" if exact else name]
    plain = module("plain", 0, device)
    model = wrap(entry, plain if exact else plain.float(), wrap=LINEARS, **options)
    x, y = own_batch(0, device)
    before = model.gather_full_parameters()
    output = model(x if exact else x.float())
    assert output.dtype == (torch.float64 if exact else torch.bfloat16)
    (output.double() - y).square().mean().backward()
    model.finish_gradient_synchronization()
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
    # The largest error over all tensors: that of one small tensor may be small by luck.
    error, allowed = (max((other[k] - exact[k]).norm() / exact[k].norm() for k in exact) for other in (ours, theirs))
    assert 0 < error <= 2 * allowed, f"{error} against {allowed} of FSDP2"
