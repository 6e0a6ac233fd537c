"""Counters of a step: each against a workload that does a known thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from shardmark.api.workload import Mark
from shardmark.meter.counters import _STEP, Counters, _of_the_device, _Tally, count
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Measured
from shardmark.plugin import WorldsBySize
from shardmark.rows.fill import counters_entry
from tests.support.counting import Step, counted, plain

NONE = {"collectives": [], "bytes_sent": 0, "kernels": None, "synchronizations": 0}
"""Counters of a step on CPU that neither communicates nor waits."""


def test_a_step_of_two_linears() -> None:
    found = counted(Step(plain))
    assert {name: getattr(found, name) for name in NONE} == NONE
    # Two products, ReLU and the sum; the gradient of the sum is filled with ones, then come ReLU's and three products.
    assert found.operators == 4 + 5
    assert found.flops == 2 * 2 * (2 * (8 * 16) + 3 * (16 * 4))  # two rows, and two FLOPs to multiply and add
    assert found.saved_bytes == 2 * 16 * 4  # what ReLU gives, once: input and weights are the workload's own


def reads_a_value(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) * x.sum().item()  # type: ignore[no-any-return]


def finds_a_shape(model: nn.Module, x: Tensor) -> Tensor:
    """Finds how many columns a mask keeps, in backward too."""
    return model(x)[:, torch.ones(4, dtype=torch.bool)]  # type: ignore[no-any-return]


def takes_by_index(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, torch.ones(4, dtype=torch.int64)]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("forward", "times"), [(reads_a_value, 1), (finds_a_shape, 2), (takes_by_index, 0)])
def test_the_host_waits_where_it_reads_a_value_or_finds_a_shape(forward: Any, times: int) -> None:
    assert counted(Step(forward)).synchronizations == times


def test_views_and_empty_tensors_are_no_operators() -> None:
    def viewed(model: nn.Module, x: Tensor) -> Tensor:
        torch.empty(3), x.new_empty(2).resize_(3), x.detach().T.split(4)[0].unsqueeze_(0)
        return plain(model, x).view(-1).unsqueeze(0)

    assert counted(Step(viewed)).operators == counted(Step(plain)).operators == 9


class Attention(Step):
    """Causal attention of q, k and v (2 heads of 4 x 16); PyTorch's formulas count the whole square of scores."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.qkv = [torch.randn(1, 2, 4, 16, requires_grad=True) for _ in range(3)]

    def step(self, mark: Mark) -> None:
        self.loss = scaled_dot_product_attention(*self.qkv, is_causal=True).sum()
        mark("forward")
        self.loss.backward()


def test_attention_on_cpu_has_its_flops() -> None:
    """Two products forward; five backward, as one is computed again."""
    product = 2 * 2 * 4 * 4 * 16
    assert counted(Attention()).flops == 7 * product


class Adds(Step):
    """A product, and one that is added to a tensor in place."""

    def step(self, mark: Mark) -> None:
        self.x.T @ self.x
        torch.zeros(8, 8).addmm_(self.x.T, self.x)


def test_a_product_that_is_added_in_place_has_its_flops() -> None:
    assert counted(Adds(plain)).flops == 2 * (2 * 8 * 2 * 8)


def convolution(model: nn.Module, x: Tensor) -> Tensor:
    return torch.nn.functional.conv1d(model(x).unsqueeze(1), torch.ones(1, 1, 3))


def with_a_vector(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) @ torch.ones(4)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [convolution, with_a_vector])
def test_flops_that_cannot_be_counted_are_none(forward: Any) -> None:
    found = counted(Step(forward))
    assert found.flops is None and found.operators is not None


def test_compiled_code_is_not_compiled_anew_and_not_counted() -> None:
    compiles: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compiles.append(graph)
        return graph

    torch.compiler.reset()
    found = counted(Step(torch.compile(plain, backend=backend)))
    assert len(compiles) == 1
    assert (found.operators, found.flops, found.saved_bytes) == (None, None, None)
    assert found.synchronizations == 0


class Breaks(Step):
    """Does two steps and fails the third."""

    steps = 2

    def step(self, mark: Mark) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise RuntimeError("no third step")
        super().step(mark)


def test_what_fails_is_not_counted_and_nothing_fails_with_it() -> None:
    found = counted(Breaks(plain))
    assert found.operators == 9 and found.saved_bytes is None
    broken = Breaks(plain)
    broken.steps = 0
    assert count(broken, "cpu") is None


class Communicates(Step):
    """Two all-reduces, a reduce-scatter to each rank, a message from rank 0 and a barrier."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.tensors = torch.ones(4), torch.ones(8), torch.ones(4, dtype=torch.float64)

    def step(self, mark: Mark) -> None:
        part, whole, message = self.tensors
        dist.all_reduce(part)
        dist.all_reduce(part)
        dist.reduce_scatter(part, list(whole.chunk(2)))
        dist.send(message, 1) if dist.get_rank() == 0 else dist.recv(message, 0)
        dist.barrier()


def counters_of(make: Callable[[], Any]) -> Measured:
    return Measured("gloo", Memory(), counters=counted(make()))


def test_collectives_are_in_order_with_dtype_and_bytes(worlds: WorldsBySize) -> None:
    row = counters_entry(worlds(2).run(counters_of, Communicates))
    assert row["collectives"] == [
        ["all_reduce", "float32", 16, 2],
        ["reduce_scatter", "float32", 32, 1],
        ["send", "float64", 32, 1],
        ["barrier", "uint8", 0, 1],
    ]
    assert row["bytes_sent"] == 16 + 16 + 16 + 32  # rank 0's, which sends the message


class ShardedProduct(Step):
    """A product; each rank has half of its rows."""

    def __init__(self) -> None:
        super().__init__(plain)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.sharded = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        self.whole = distribute_tensor(torch.ones(4, 2), mesh)

    def step(self, mark: Mark) -> None:
        self.sharded @ self.whole


def test_flops_of_a_sharded_tensor_are_those_of_its_shard(worlds: WorldsBySize) -> None:
    row = counters_entry(worlds(2).run(counters_of, ShardedProduct))
    assert row["flops"] == 2 * 4 * 4 * 2 and row["operators"] == 1


class ClipsAShard(Step):
    """Clips gradients of which each rank has a part: DTensor sums the norm inside of an operator."""

    def __init__(self) -> None:
        super().__init__(plain)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.parameter = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
        self.parameter.grad = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])

    def step(self, mark: Mark) -> None:
        nn.utils.clip_grad_norm_([self.parameter], 1.0)


def test_collectives_that_start_inside_an_operator_are_seen(worlds: WorldsBySize) -> None:
    row = counters_entry(worlds(2).run(counters_of, ClipsAShard))
    assert row["collectives"] == [["all_reduce", "float32", 4, 1]] and row["bytes_sent"] == 4


def event(name: str, kind: str, start_ns: int, end_ns: int) -> Any:
    """An event as the profiler reports it."""
    return SimpleNamespace(
        name=lambda: name, activity_type=lambda: kind, start_ns=lambda: start_ns, end_ns=lambda: end_ns
    )


STEP_ON_CUDA = [
    event(_STEP, "user_annotation", 10, 20),
    event(_STEP, "gpu_user_annotation", 12, 30),
    event("void gemm<float>", "kernel", 15, 19),
    event("void add<float>", "kernel", 21, 22),
    event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 20, 21),
    event("cudaStreamSynchronize", "cuda_runtime", 13, 14),
    event("cudaDeviceSynchronize", "cuda_runtime", 21, 22),
]


def test_on_cuda_kernels_and_waits_are_the_profilers() -> None:
    assert _of_the_device(STEP_ON_CUDA) == (2, 1)


def test_on_cuda_without_a_kernel_the_profiler_saw_nothing() -> None:
    assert _of_the_device([each for each in STEP_ON_CUDA if each.activity_type() != "kernel"]) == (None, None)


def test_the_step_is_an_annotation_to_the_profiler() -> None:
    with profile() as profiler, record_function(_STEP):
        pass
    assert profiler.kineto_results is not None
    steps = [event for event in profiler.kineto_results.events() if event.name() == _STEP]
    assert [event.activity_type() for event in steps] == ["user_annotation"]


@dataclass(frozen=True)
class Operator:
    """A profiler event of an operator on tensors of that shape."""

    name: str
    shape: tuple[int, ...]
    children: tuple[Operator, ...] = ()

    @property
    def typed(self) -> tuple[Any, Any]:
        tensor = SimpleNamespace(sizes=self.shape, dtype=torch.bfloat16)
        return _EventType.TorchOp, SimpleNamespace(scope=RecordScope.FUNCTION, inputs=3 * [tensor])


def test_of_operators_within_each_other_the_outer_one_has_the_flops() -> None:
    """Such as attention on CUDA, whose inner operator has heads and sequence swapped."""
    inner = Operator("aten::_flash_attention_forward", (1, 4, 2, 16))
    tally = _Tally()
    tally.follow(Operator("aten::_scaled_dot_product_flash_attention", (1, 2, 4, 16), (inner,)))
    assert tally.flops == 2 * (2 * 2 * 4 * 4 * 16) and tally.names.total() == 1


def test_a_row_has_the_largest_ranks_and_nothing_where_nothing_was_counted() -> None:
    made = partial(Counters, [], synchronizations=0, kernels=None, saved_bytes=None)
    names: list[dict[str, int]] = [{"aten::mm": 2, "aten::add": 1}, {"aten::mm": 1, "aten::relu": 4}]
    ranks = [
        Measured("gloo", Memory(), counters=made(bytes_sent=8, operators=3, flops=None, operators_by_name=names[0])),
        Measured("gloo", Memory(), counters=made(bytes_sent=4, operators=5, flops=7, operators_by_name=names[1])),
    ]
    entry = counters_entry(ranks)
    assert {name: value for name, value in entry.items() if value is not None} == {
        **{"collectives": [], "bytes_sent": 8, "operators": 5, "synchronizations": 0},
        "operators_by_name": names[1],
    }
    assert entry["flops"] is None and entry["bytecodes"] is None
    assert counters_entry([*ranks, Measured("gloo", Memory())]) == {}
