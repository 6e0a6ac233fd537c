"""Code that `torch.compile` compiles, in a simulation: the bytes of a real run, and one kernel for what is fused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from shardmark.api.registry import Unsupported, family
from shardmark.meter.hardware import hardware
from shardmark.meter.measure_case import meter_pass
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.fusion import Kernel, kernels_of
from shardmark.predict.simulation.predict import predict, simulation
from shardmark.predict.simulation.rates import GPU
from shardmark.predict.simulation.schedule import Schedule
from shardmark.predict.what_fits.prediction import followed
from tests.support import compiled_models


def kernels(function: Callable[..., Any], *args: Tensor) -> list[Kernel]:
    """The fused kernels of the function's graph, with PyTorch's own operators decomposed as Inductor does."""
    from torch._inductor.decomposition import select_decomp_table

    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*args).graph
    return [kernel for kernel in kernels_of(graph) if kernel.cost is not None]


def mebibytes(kernel: Kernel) -> float:
    assert kernel.cost is not None
    return kernel.cost.nbytes / 2**20


X = torch.ones(1024, 256)  # 1 MiB


def test_pointwise_operators_are_one_kernel() -> None:
    (one,) = kernels(lambda x, y: gelu(x * y + 1).relu(), X, torch.ones(1024, 256))
    assert mebibytes(one) == 3


def test_a_reduction_of_rows_is_of_the_kernel_that_uses_it() -> None:
    (one,) = kernels(lambda x: layer_norm(x, (256,)), X)
    assert mebibytes(one) == 2
    (one,) = kernels(lambda x: x.softmax(-1), X)
    assert mebibytes(one) == 2


def test_a_reduction_of_columns_reads_all_again() -> None:
    rows, columns = kernels(lambda x: ((x * 2).sum(-1), (x * 2).sum(0)), X)
    assert mebibytes(rows) == 1 + 1024 * 4 / 2**20
    assert mebibytes(columns) == 1 + 256 * 4 / 2**20


def test_a_product_reads_what_a_kernel_has_made() -> None:
    before, after = kernels(lambda x, w: (x.relu() @ w).relu(), X, torch.ones(256, 256))
    assert mebibytes(before) == mebibytes(after) == 2


def test_a_view_of_a_slice_is_read_in_part() -> None:
    (one,) = kernels(lambda x: x[:, :64].relu(), X)
    assert mebibytes(one) == pytest.approx(0.5)


def test_a_cheap_value_is_computed_twice_and_a_dear_one_kept() -> None:
    def used_twice(deep: int, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(deep):
            x = x.sin()
        return x + 1, (x @ w).sum(0)

    weight = torch.ones(256, 256)
    for deep in (1, 40):
        first, *_ = kernels(partial(used_twice, deep), X, weight)
        assert mebibytes(first) == 3  # the product needs the value itself
    cheap = kernels(lambda x: (x.sin().sum(0), x.sin() + 1), X)
    assert sum(map(mebibytes, cheap)) == pytest.approx(3, rel=0.01)


def times(function: Callable[..., Any], *args: Tensor) -> tuple[float, float]:
    """Seconds of the function on an H100, eager and compiled."""
    found = []
    with simulation(on=hardware("h100-80gb")) as schedule:
        for run in (function, torch.compile(function)):
            run(*args)  # is compiled here
            step = schedule.step(lambda mark, run=run: void(run(*args)))
            assert step is not None
            found.append(step.seconds)
    return found[0], found[1]


def void(value: Any) -> None:
    """Drop it."""


def test_what_is_fused_reads_and_writes_once() -> None:
    eager, compiled = times(lambda x: ((x + 1) * 2 - 3).relu(), torch.empty(2**14, 2**14))
    assert eager / compiled == pytest.approx(4, rel=0.02)


def test_products_take_as_long() -> None:
    eager, compiled = times(lambda x: x @ x, torch.empty(2**13, 2**13))
    assert compiled == pytest.approx(eager, rel=0.01)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "name",
    [
        "blocks",
        "with_loss",
        "fused_attention",
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("whole", "checkpointed", "dropping", "in_bfloat16")),
    ],
)
def test_its_bytes_are_those_of_a_real_run(name: str) -> None:
    """Recomputed blocks may run in another order than Inductor chooses."""
    plan = plan_of(name)
    memory = predict(plan).memory
    _, measured, _ = meter_pass(plan)  # what the simulation compiled is compiled anew
    within = 0.1 if name == "checkpointed" else 0.01
    assert memory.peaks["second"] == pytest.approx(measured.peaks["second"], rel=within)
    assert memory.phases["after_forward"] == pytest.approx(measured.phases["after_forward"], rel=1e-3)
    eager = predict(plan_of("eager" if name != "in_bfloat16" else "eager_in_bfloat16")).memory
    assert memory.peaks["second"] != eager.peaks["second"]


def plan_of(name: str) -> Plan:
    """Training of one of the compiled models on one process."""
    steps = family("training_step")
    assert steps.workload is not None
    case = followed(f"{compiled_models.__name__}:{name}").case
    return Plan(steps.workload, steps.implementations["eager"], None, case, "cpu", 1)


def test_its_pace_on_a_cpu_is_not_known() -> None:
    """There it is C++, whose kernels no figure is for."""
    rates = GPU(hardware("h100-80gb"))
    rates.on_host = True
    compiled, x = torch.compile(lambda x: (x @ x).relu()), torch.ones(8, 8)
    with simulation(schedule=Schedule(rates)) as schedule:
        assert schedule.step(lambda mark: void(compiled(x))) is None
        assert schedule.step(lambda mark: void((x @ x).relu())) is not None


@pytest.mark.usefixtures("compiler")
def test_afterwards_real_code_runs() -> None:
    compiled = torch.compile(lambda x: (x * 2).sum())
    assert compiled(torch.ones(3)) == 6
    with simulation():
        compiled(torch.ones(3))
    assert compiled(torch.ones(3)) == 6


def test_no_simulation_leaves_its_kernels_to_the_next() -> None:
    """PyTorch remembers which kernel an operator has; a GPU's rules give attention others."""
    q = torch.ones(1, 2, 128, 64, requires_grad=True)
    attend = torch.compile(partial(scaled_dot_product_attention, is_causal=True), backend="aot_eager")
    called: list[set[str]] = []
    for on in ("cpu", "h100-80gb", "cpu"):
        where = {} if on == "cpu" else {"on": hardware(on)}
        with simulation(**where), profile(activities=[ProfilerActivity.CPU]) as profiler:
            attend(q, q, q)
        called.append({event.name for event in profiler.events() if "flash" in event.name})
    attend(q, q, q).sum().backward()
    assert called[0] == called[2] != called[1] and q.grad is not None


def test_a_sum_over_no_rows_is_compiled() -> None:
    with simulation():
        assert torch.compile(lambda x: x.sum(0) + 1)(torch.ones(0, 4)).shape == (4,)


def test_dynamic_shapes_are_those_of_the_step() -> None:
    with simulation():
        assert torch.compile(lambda x: x + 1, dynamic=True)(torch.ones(4, 8)).shape == (4, 8)


def test_compilation_that_fails_says_so_in_one_line() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    marked = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(marked, 0)
    for function, options, x, why in (
        (
            breaks,
            {"fullgraph": True},
            torch.ones(4, 8),
            r"torch\.compile: Unsupported: Call to `torch._dynamo.graph_break",
        ),
        (torch.sin, {}, marked, "no dynamic shapes"),
    ):
        with simulation(), pytest.raises(Unsupported, match=why) as caught:
            torch.compile(function, **options)(x)
        assert "\n" not in str(caught.value)


def test_a_graph_that_breaks_goes_on_in_parts() -> None:
    def breaks(x: Tensor) -> Tensor:
        x = (x + 1).relu()
        torch._dynamo.graph_break()
        return (x + 1).relu()

    eager, compiled = times(breaks, torch.empty(2**14, 2**14))
    assert eager / compiled == pytest.approx(2, rel=0.02)


def test_an_operator_of_the_compilers_own_is_refused_in_one_line() -> None:
    q = torch.ones(1, 1, 128, 64)
    with simulation(), pytest.raises(Unsupported, match="does not run flex_attention"):
        torch.compile(flex_attention)(q, q, q)
