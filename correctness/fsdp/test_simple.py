"""SimpleFSDP against one process with the whole batch; its collectives and their dtypes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from correctness.fsdp.modes import PARAMETERS, TINY, Collectives, mesh_for, ranks_for
from correctness.support.training import whole
from correctness.support.whole_batch import (
    DIM,
    MODULES,
    TiedAndFrozen,
    adam,
    assert_equal_states,
    batch,
    loss,
    module,
    own_batch,
    single_process,
    train,
)
from impl.checkpointing import full
from impl.fsdp.dtensors import clip_grad_norm_
from impl.fsdp.simple import PLACEMENTS, SimpleFullyShardedDataParallel, data_parallel
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from shardmark.plugin import WorldsBySize


def train_on_rank(mode: str, name: str, device: str, reshard: bool) -> dict[str, Tensor]:
    """Start each rank from its own weights: rank 0's must reach the others."""
    model = module(name, dist.get_rank(), device)
    assert data_parallel(model, mesh_for(mode, device), mode, reshard_after_forward=reshard) is model
    train(model, adam(model), device)
    return {key: whole(tensor) for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tied_and_frozen" else pytest.mark.sweep) for name in MODULES]
)
@pytest.mark.parametrize(
    ("mode", "reshard"),
    [("replicate", True), ("fully_shard", True), ("fully_shard", False), ("hybrid_shard", True)],
    ids=["replicate", "fully_shard", "fully_shard_keep", "hybrid_shard"],
)
def test_parameters_equal_a_single_process_on_the_whole_batch(
    mode: str, name: str, reshard: bool, device: str, worlds: WorldsBySize
) -> None:
    world = worlds(ranks_for(mode))
    assert_equal_states(world.run(train_on_rank, mode, name, device, reshard), single_process(name, world.size, device))


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(5, marks=pytest.mark.sweep)])
def test_rows_need_not_divide_by_the_ranks(ranks: int, device: str, worlds: WorldsBySize) -> None:
    """With 12 rows, a fifth rank has none."""
    found = worlds(ranks).run(train_on_rank, "fully_shard", "plain", device, True)
    assert_equal_states(found, single_process("plain", ranks, device))


def communicate(
    mode: str, device: str, policy: MixedPrecisionPolicy, reshard: bool, checkpointed: bool
) -> tuple[list[dict[Any, int]], list[str]]:
    """Return the calls in forward and backward, elements in backward, and the dtypes of logits, parameter and
    gradient."""
    model = MLPLanguageModel(MLP_SIZES["mlp-tiny"]).to(device)
    data_parallel(model, mesh_for(mode, device), mode, policy, reshard_after_forward=reshard)
    if checkpointed:
        full(model)
    with Collectives() as forward:
        logits = model(torch.randint(512, (2, 8), device=device))
    with Collectives() as backward:
        logits.sum().backward()
    parameter: Any = next(model.parameters())
    dtypes = [str(tensor.dtype) for tensor in (logits, parameter, parameter.grad)]
    return [dict(forward.calls), dict(backward.calls), dict(backward.values)], dtypes


SAVED = 3 + 2 * TINY.layers
"""Parameters that eager backward reads: the blocks' matrices, the norm's weight and bias, the output's matrix."""


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("reshard", [True, False], ids=["regather", "keep"])
def test_backward_gathers_what_it_reads_or_nothing(
    reshard: bool, checkpointed: bool, device: str, worlds: WorldsBySize
) -> None:
    """A checkpointed block gathers its biases again too."""
    in_blocks = 4 * TINY.layers if checkpointed else 2 * TINY.layers * reshard
    outside = 3 * reshard
    for (forward, backward, _), _ in worlds(2).run(
        communicate, "fully_shard", device, MixedPrecisionPolicy(), reshard, checkpointed
    ):
        assert forward == {("all_gather", "float32"): PARAMETERS}
        assert backward.pop(("reduce_scatter", "float32")) == PARAMETERS
        assert backward == ({("all_gather", "float32"): in_blocks + outside} if in_blocks + outside else {})


def test_replicas_gather_nothing_and_reduce_all(device: str, worlds: WorldsBySize) -> None:
    for (forward, backward, values), _ in worlds(2).run(
        communicate, "replicate", device, MixedPrecisionPolicy(), True, False
    ):
        assert forward == {}
        assert backward == {("all_reduce", "float32"): PARAMETERS}
        assert values == {"all_reduce": TINY.parameters}


def test_hybrid_reduces_shards_alone_over_the_copies(device: str, worlds: WorldsBySize) -> None:
    for (_, backward, values), _ in worlds(4).run(
        communicate, "hybrid_shard", device, MixedPrecisionPolicy(), False, False
    ):
        assert backward == {("reduce_scatter", "float32"): PARAMETERS, ("all_reduce", "float32"): PARAMETERS}
        assert values == {"reduce_scatter": TINY.parameters, "all_reduce": TINY.parameters // 2}


@pytest.mark.parametrize("mode", PLACEMENTS)
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("gather", ["float32", "bfloat16"])
def test_gathers_and_reductions_are_in_the_policys_dtypes(
    gather: str, reduce: str, mode: str, device: str, worlds: WorldsBySize
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gather), reduce_dtype=getattr(torch, reduce))
    for (forward, backward, _), dtypes in worlds(ranks_for(mode)).run(communicate, mode, device, policy, True, False):
        assert {dtype for _, dtype in forward} == ({gather} if mode != "replicate" else set())
        assert {dtype for name, dtype in backward if name == "all_gather"} <= {gather}
        assert {dtype for name, dtype in backward if name != "all_gather"} == {reduce}
        assert dtypes == [f"torch.{gather}", "torch.float32", "torch.float32"]


def cast_in_and_out(device: str) -> list[torch.dtype]:
    model = nn.Sequential(nn.Linear(DIM, DIM)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    data_parallel(model, mesh_for("fully_shard", device), mp_policy=policy)
    seen = []
    model[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0].dtype))
    return [model(torch.ones(1, DIM, device=device)).dtype, *seen]


def test_inputs_and_outputs_are_cast_as_the_policy_says(device: str, worlds: WorldsBySize) -> None:
    assert worlds(2).run(cast_in_and_out, device) == 2 * [[torch.float64, torch.bfloat16]]


def keeps_names(device: str) -> None:
    torch.manual_seed(0)
    plain = TiedAndFrozen().to(device)
    names = list(plain.state_dict())
    expected = {name: p.detach().clone() for name, p in plain.named_parameters(remove_duplicate=False)}
    wrapped = SimpleFullyShardedDataParallel(plain)
    assert wrapped.module is plain and isinstance(plain, TiedAndFrozen) and isinstance(plain.hidden, nn.Linear)
    assert list(wrapped.state_dict()) == names
    assert all(isinstance(p, DTensor) and p.to_local().shape[0] * 2 == p.shape[0] for p in wrapped.parameters())
    assert plain._modules["tied"]._parameters["weight"] is plain._modules["embed"]._parameters["weight"]
    assert not plain._modules["frozen"]._parameters["weight"].requires_grad
    found = wrapped.gather_full_parameters()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    wrapped(torch.ones(1, DIM, device=device)).sum().backward()
    wrapped.finish_gradient_synchronization()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
        else:
            assert parameter.grad is None


def test_names_classes_and_ties_do_not_change(device: str, worlds: WorldsBySize) -> None:
    worlds(2).run(keeps_names, device)


def complaint(what: str, device: str) -> str:
    """Return the error of a bad call, which every rank must raise alike."""
    model = nn.Linear(4, 4).to(device)
    line = mesh_for("fully_shard", device)
    square = init_device_mesh(device, (2, 1))
    try:
        match what:
            case "mode":
                data_parallel(model, line, "sharded")
            case "hybrid":
                data_parallel(model, line, "hybrid_shard")
            case "two_dimensions":
                data_parallel(model, square)
            case "part":
                data_parallel(nn.Sequential(data_parallel(model, line)), line)
            case "scalar":
                model.scale = nn.Parameter(torch.ones((), device=device))
                data_parallel(model, line)
            case "different":
                data_parallel(nn.Linear(4, 4 + dist.get_rank()).to(device), line)
            case "changed":
                layers = data_parallel(nn.Sequential(model, nn.Linear(4, 4).to(device)), line)
                output = layers(torch.ones(1, 4, device=device)).sum()
                with torch.no_grad():
                    for parameter in layers.parameters():
                        parameter.mul_(2)
                output.backward()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("mode", "ValueError: mode is one of replicate, fully_shard, hybrid_shard, not 'sharded'"),
        ("hybrid", "ValueError: hybrid_shard takes a mesh of 2 dimensions, got (2,)"),
        ("two_dimensions", "ValueError: fully_shard takes a mesh of 1 dimension, got (2, 1)"),
        ("part", "ValueError: this Sequential is sharded over ranks already, at '0': give it an unsharded module"),
        ("scalar", "Unsupported: fully_shard splits rows, and scale has none: give it the shape (1,)"),
        (
            "different",
            "ValueError: the ranks' modules differ at 'weight': (4, 4) of torch.float32, trainable on rank 0, "
            "(5, 4) of torch.float32, trainable on rank 1",
        ),
        (
            "changed",
            "RuntimeError: a parameter of shape (4, 4) was changed between forward and backward, which gathers it "
            "again: run backward first, or pass reshard_after_forward=False",
        ),
    ],
)
def test_bad_calls_are_one_line(what: str, line: str, device: str, worlds: WorldsBySize) -> None:
    assert worlds(2).run(complaint, what, device) == [line, line]


def clipped(mode: str, device: str) -> None:
    """Compare clipping with PyTorch's on the unsharded model: once with a norm that is too large, once not."""
    plain, model = (module("tied_and_frozen", seed, device) for seed in (0, dist.get_rank()))
    data_parallel(model, mesh_for(mode, device), mode)
    loss(plain, *batch(0, dist.get_world_size(), device)).backward()
    loss(model, *own_batch(0, device)).backward()
    for max_norm in (0.5, 100.0):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        torch.testing.assert_close(clip_grad_norm_(model, max_norm), expected, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = plain.get_parameter(name).grad.cpu()
            torch.testing.assert_close(whole(parameter.grad), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["replicate", "hybrid_shard"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_in_every_mode(
    mode: str, device: str, worlds: WorldsBySize
) -> None:
    """Test clipping in every mode; the family's own test covers full sharding."""
    worlds(ranks_for(mode)).run(clipped, mode, device)
