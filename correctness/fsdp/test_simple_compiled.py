"""Compiled steps of SimpleFSDP against eager ones, for each pair of dtypes."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

from correctness.fsdp.modes import PARAMETERS, TINY, Collectives, mesh_for
from correctness.support.training import Results, assert_as_accurate_as_eager, trained, whole
from impl.checkpointing import full
from impl.fsdp.simple import data_parallel
from impl.model.mlp import MLPLanguageModel
from impl.precision import FLOAT32, Precision
from impl.training_step import CompileForwardBackward, CompileModel, CompileStep, EagerStep
from shardmark.plugin import WorldsBySize

COMPILED = {"model": CompileModel, "forward_backward": CompileForwardBackward, "step": CompileStep}
FLOAT64 = Precision(torch.float64, torch.float64, torch.float64)


def steps_on_rank(
    step_class: type[EagerStep], policy: MixedPrecisionPolicy, checkpointed: bool, precision: Precision, device: str
) -> tuple[Results, int]:
    """Train with a different batch per rank. Return the results and the number of all-gathers in one more step."""
    torch.manual_seed(0)
    model = MLPLanguageModel(TINY).to(device, precision.parameter)
    data_parallel(model, mesh_for("fully_shard", device), mp_policy=policy)
    if checkpointed:
        full(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW would amplify the rounding of a gradient near zero
    step = step_class(model, optimizer, precision=precision)
    torch.manual_seed(dist.get_rank())
    tokens, targets = torch.randint(TINY.vocab, (2, 2, 8), device=device)
    results = trained(step, model, optimizer, tokens, targets)
    optimizer.zero_grad()
    with torch.autograd.profiler.profile() as profile:
        step(tokens, targets)
    return results, sum(event.name == "_c10d_functional::all_gather_into_tensor" for event in profile.function_events)


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("gather", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("placement", COMPILED)
def test_compiled_steps_are_as_accurate_as_eager_ones(
    placement: str, checkpointed: bool, gather: str, reduce: str, device: str, worlds: WorldsBySize
) -> None:
    """Backward gathers the matrices and the norm's weight again, and the biases that checkpointing needs to recompute:
    all but the last block's output. Where forward and backward are one graph, its compiler decides."""
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gather), reduce_dtype=getattr(torch, reduce))
    exact, expected, found = (
        worlds(2).run(steps_on_rank, step_class, policy, checkpointed, precision, device)
        for step_class, policy, precision in (
            (EagerStep, MixedPrecisionPolicy(), FLOAT64),
            (EagerStep, policy, FLOAT32),
            (COMPILED[placement], policy, FLOAT32),
        )
    )
    again = 2 + 2 * TINY.layers + (2 * TINY.layers - 1 if checkpointed else 0)
    for rank in range(2):
        assert_as_accurate_as_eager(found[rank][0], expected[rank][0], exact[rank][0], policy.param_dtype)
        if placement != "step":
            assert found[rank][1] == PARAMETERS + again


class Found(NamedTuple):
    """Output and gradient of a layer, and the number of graphs captured so far."""

    graphs: int
    output: Tensor
    gradient: Tensor
    reductions: set[str]
    """dtypes of its reductions."""


def forward_and_backward(gather: str, reduce: str, reshard: bool, captured: bool, device: str) -> Found:
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gather), reduce_dtype=getattr(torch, reduce))
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False, device=device)
    data_parallel(layer, mesh_for("fully_shard", device), mp_policy=policy, reshard_after_forward=reshard)
    if captured:
        layer.compile(backend="eager", dynamic=False, fullgraph=True)
    output = layer(torch.randn(3, 8, device=device))
    with Collectives() as backward:
        output.square().sum().backward()
    reductions = {dtype for name, dtype in backward.calls if name == "reduce_scatter"}
    return Found(
        counters["stats"]["unique_graphs"], output.detach().cpu(), whole(layer._parameters["weight"].grad), reductions
    )


SETTINGS = (
    ("float32", "float32", True),
    ("float32", "float32", True),
    ("float32", "bfloat16", True),
    ("bfloat16", "float32", True),
    ("float32", "float32", False),
)
"""Gather dtype, reduce dtype, and whether backward gathers again."""


def capture_in_turn(device: str) -> list[tuple[Found, Found]]:
    """Run each of SETTINGS eager and captured, in one process."""
    torch._dynamo.reset()
    counters.clear()
    return [
        (forward_and_backward(*settings, False, device), forward_and_backward(*settings, True, device))
        for settings in SETTINGS
    ]


def test_a_capture_serves_models_that_are_sharded_alike_and_no_others(device: str, worlds: WorldsBySize) -> None:
    """Models with other shards need a new capture; a second capture would take as long as the first."""
    for found in worlds(2).run(capture_in_turn, device):
        assert [captured.graphs for _, captured in found] == [1, 1, 2, 3, 4]
        for (_, reduce, _), (eager, captured) in zip(SETTINGS, found, strict=True):
            assert torch.equal(captured.output, eager.output) and captured.output.dtype == eager.output.dtype
            assert torch.equal(captured.gradient, eager.gradient)
            assert captured.reductions == eager.reductions == {reduce}
