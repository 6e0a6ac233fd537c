"""Predicted memory against the meter: to the byte, by phase, on every rank."""

import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.library import _scoped_library

from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from shardmark.api.registry import Unsupported, family
from shardmark.meter.hardware import hardware
from shardmark.meter.memory import meter
from shardmark.meter.plan import Plan
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.group import gloo, one_rank_of
from shardmark.predict.simulation.no_kernels import no_kernels
from shardmark.predict.simulation.predict import predict, simulation
from tests.support.predicting import CASES, COMPILED, PROGRAMS, allocations, assert_metered_as_predicted
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

SOME = {
    ("checkpointing", "selective"),
    ("loss", "fused_pytorch"),
    ("data_parallel", "ddp"),
    ("sharded_optimizer", "sharded"),
    ("fsdp", "sharded"),
    ("fsdp", "fsdp1"),
    ("fsdp", "fsdp2"),
}
"""Tried every time, in their first case and on two ranks; all others are the sweep's."""


def _plans() -> list[Any]:
    found = []
    for name, (workload, cases, sizes) in CASES.items():
        for implementation in family(name).implementations.values():
            if any(part in implementation.name for part in COMPILED):
                continue
            for case in cases:
                for size in sizes:
                    own = replace(case, ranks=size) if hasattr(case, "ranks") else case
                    plan = Plan(workload, implementation, None, own, "cpu", size)
                    often = (name, implementation.name) in SOME and case is cases[0] and size == sizes[0]
                    marks = [] if often else [pytest.mark.sweep]
                    found.append(pytest.param(plan, id=f"{name}-{implementation}-{own}-{size}", marks=marks))
    return found


@pytest.mark.parametrize("plan", _plans())
def test_what_is_predicted_is_what_each_rank_meters(plan: Plan, worlds: WorldsBySize) -> None:
    if reason := plan.implementation.unavailable_reason("cpu", to_measure=True):
        pytest.skip(reason)
    assert_metered_as_predicted(plan, worlds)


@pytest.mark.parametrize("size", [20, 200], ids=["with_values", "without"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_without_kernels_allocates_what_it_does_with_them(program: Callable[[int], None], size: int) -> None:
    program(size)  # what PyTorch makes once
    expected = allocations(partial(program, size))
    with no_kernels(gloo):
        assert allocations(partial(program, size)) == expected


def collectives_on_gloo() -> dict[str, list[tuple[str, int]]]:
    """Bytes that each collective allocates on this rank, for tensors of 1,000 elements a rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    large, small = torch.zeros(size * 1000), torch.zeros(1000)
    parts = list(large.chunk(size))
    programs = {
        "all_reduce": partial(dist.all_reduce, large),
        "broadcast": partial(dist.broadcast, large, 0),
        "all_gather": partial(dist.all_gather, parts, small),
        "all_gather_into_tensor": partial(dist.all_gather_into_tensor, large, small),
        "reduce_scatter": partial(dist.reduce_scatter, small, parts),
        "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, small, large),
        "gather": partial(dist.gather, small, parts if rank == 0 else None),
        "scatter": partial(dist.scatter, small, parts if rank == 0 else None),
    }
    return {name: sorted(allocations(program)) for name, program in programs.items()}


def test_collectives_allocate_what_gloo_does(worlds: WorldsBySize) -> None:
    for rank, real in enumerate(worlds(3).run(collectives_on_gloo)):
        with one_rank_of(3, rank), no_kernels(gloo):
            assert collectives_on_gloo() == real


@pytest.mark.parametrize(("key", "times"), [("CPU", 1), ("CompositeExplicitAutograd", 4)])
def test_a_librarys_kernel_for_the_cpu_is_not_that_of_a_gpu(key: str, times: int) -> None:
    """Such as bitsandbytes' optimizers, whose kernels on the CPU have temporaries. One for all devices is the GPU's."""
    with _scoped_library("shardmark_predicted", "FRAGMENT") as library:
        library.define("padded(Tensor(a!) x) -> Tensor")
        library.impl("padded", lambda x: torch.empty(3 * x.numel()).narrow(0, 0, x.numel()).clone(), key)
        torch.library.register_fake("shardmark_predicted::padded", torch.empty_like, lib=library)
        x = torch.empty(2**28)
        with simulation(on=hardware("h100-80gb")) as schedule:
            with meter("cpu") as memory:
                torch.ops.shardmark_predicted.padded(x)
            step = schedule.step(lambda mark: torch.ops.shardmark_predicted.padded(x))
    assert memory.tensors == times * 4 * x.numel()
    assert step is not None and step.seconds > 2 * 4 * x.numel() / 3.35e12  # it reads and writes memory at most so fast


def test_no_page_of_a_large_tensor_is_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with no_kernels(gloo):
        x = torch.ones(2**15, 2**15, requires_grad=True)  # 4 GiB
        (x @ x).relu().sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_numbers_of_the_program_have_values() -> None:
    with no_kernels(gloo):
        order = torch.tensor([2, 0, 1])
        assert order.sort().indices.tolist() == [1, 2, 0] and torch.arange(5).sum().item() == 10
        assert torch.arange(100_000)[-1].item() == 99_999
        sizes = torch.full((3,), 7)
        sizes.mul_(2)
        assert int(sizes[1]) == 14


def test_weights_are_drawn_within_bounds_without_values() -> None:
    with no_kernels(gloo):
        assert torch.nn.init.trunc_normal_(torch.empty(300, 300), std=0.02).shape == (300, 300)


def test_numbers_that_were_not_computed_are_taken_for_finite() -> None:
    with no_kernels(gloo):
        norm = (torch.randn(300, 300) @ torch.randn(300, 300)).norm()
        assert norm.isfinite() and not norm.isnan() and not norm.isinf()
        assert (torch.ones(2) / 0).isinf().all()


HERE = f"{Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)}"


@pytest.mark.parametrize(
    ("read", "operator"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: bool(x.max() > 0), "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::index.Tensor"),
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: x.numpy(), "Tensor.numpy"),
    ],
    ids=["item", "bool", "nonzero", "mask", "tolist", "numpy"],
)
def test_what_depends_on_values_is_refused_in_one_line(read: Callable[[Any], object], operator: str) -> None:
    with no_kernels(gloo):
        x = torch.randn(300, 300) @ torch.randn(300, 300)
        with pytest.raises(Unsupported) as refused:
            read(x)
    line = str(refused.value)
    assert line.startswith(f"{operator} in {HERE}:") and line.endswith("depends on values, and a simulation has none")


def test_tensors_on_the_meta_device_are_pytorchs_own_business() -> None:
    with no_kernels(gloo):
        x = torch.ones(300, 300, device="meta") * 2
        assert x.is_meta and x.add_(x).sum().is_meta and torch.empty_like(x, device="cpu").shape == (300, 300)


def test_kernels_are_back_afterwards() -> None:
    with no_kernels(gloo):
        torch.ones(300, 300).sum()
    assert torch.ones(300, 300).sum().item() == 90_000


def test_a_hundred_thousand_ranks_take_no_more_room_than_one() -> None:
    """Each has at most one row of each weight; gathered parameters are padded to a row for every rank."""
    plan = Plan(
        FSDPStep, family("fsdp").implementations["fsdp2"], None, FSDPCase("tiny", 2, 32, ranks=100_000), "cpu", 100_000
    )
    assert predict(plan).memory.phases["after_init"] < 2**20


def test_simulated_rows_have_memory_and_no_times(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--simulate=cpu:7", "--scale=smoke", "-rs", "-k", "nap and (plain or greedy)")
    result.assert_outcomes(passed=1, failed=1)
    assert output["benchmarks"] == [] and not result.parseoutcomes().get("warnings")
    plain, greedy = row_of(output, "plain"), row_of(output, "greedy")
    result.stdout.fnmatch_lines(["* rows at smoke scale on 1 rank, predicted for cpu: *"])
    assert plain["simulated"] and plain["verdict"] == "pass" and greedy["verdict"] == "fail"
    assert plain["memory"]["tensors"] == 4000 and not plain["time"].get("parts")
    assert "communicator" not in plain["memory"]


def test_a_row_of_cuda_has_a_time_a_trace_and_the_bytes_that_are_reserved(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_products="""
        import pytest
        import torch
        from shardmark.api import Grid, Work
        from shardmark.api.registry import Family, Race, add_family, register
        from test_sleeps import Naps

        add_family(Family("products", object, reference="once", check=lambda target, device: None))
        register("products", "once", 1)
        register("products", "twice", 2, time=Race("once"))

        class Products:
            backend = "none"

            def __init__(self, implementation, case, device):
                self.times, self.x = implementation.target, torch.ones(4096, 4096)

            def prepare(self): pass

            def step(self, mark):
                for _ in range(self.times):
                    self.x @ self.x
                mark("products")

        @pytest.mark.family("products")
        @pytest.mark.question("What do products cost?")
        @pytest.mark.cases(Grid(smoke=[Naps(1)], laptop=[Naps(1)], paper=[Naps(1)]))
        def test_products(implementation, case, measure):
            measure(Products, implementation, case, work=Work(flops=10))
        """
    )
    result, output = run_project(project, "--simulate=h100-80gb:8", "--trace-dir=traces", "-k", "products")
    result.assert_outcomes(passed=2)
    once, twice = (row_of(output, name) for name in ("once", "twice"))
    seconds = {entry["extra_info"]["implementation"]: entry["stats"]["median"] for entry in output["benchmarks"]}
    assert seconds["twice"] == pytest.approx(2 * seconds["once"], rel=1e-6)
    assert twice["time"]["ratio"] == pytest.approx(2, rel=1e-6) and twice["time"]["peer"] == "once"
    predicted = once["time"]["predicted"]
    low, high = predicted["interval"]
    assert 2 * 4096**3 / hardware("h100-80gb").flops["float32"] == pytest.approx(predicted["at_least"])
    assert predicted["at_least"] <= low < seconds["once"] < high
    assert predicted["streams"] == {"compute": [[0.0, pytest.approx(seconds["once"])]]}
    assert once["verdict"] is None  # an estimate is judged by nobody
    assert once["memory"]["reserved"] > 0 == once["memory"]["communicator"]  # NCCL takes nothing for one rank
    [trace] = once["trace"]
    assert "mm" in (project.path / "traces" / trace).read_text()


def test_what_has_no_formula_is_held_to_its_prediction(project: pytest.Pytester) -> None:
    file = project.path / "test_sleeps.py"
    file.write_text(file.read_text().replace('"greedy", 1.0, memory=lambda case: formula(case) // 2', '"greedy", 1.0'))
    chosen = ("--scale=smoke", "-k", "nap and greedy")
    result, output = run_project(project, *chosen)
    result.assert_outcomes(passed=1)
    memory = row_of(output, "greedy")["memory"]
    assert memory["source"] == "prediction" and memory["formula"] == memory["tensors"] == 4000
    _, output = run_project(project, "--simulate=cpu", *chosen)
    row = row_of(output, "greedy")
    assert row["memory"]["tensors"] == 4000 and "budget" not in row["memory"] and row["verdict"] is None


def test_nothing_stays_mapped_of_what_was_simulated() -> None:
    """Or the system would refuse this process a fork, where that is more than the machine has."""

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def program() -> None:
        x = torch.randn(1024, 2048, requires_grad=True)  # 8 MiB, which glibc would come to take from its heap
        kept = [x * 1 for _ in range(500)]
        torch.stack([each.relu() for each in kept]).sum().backward()

    with no_kernels(gloo):
        program()
    before = mapped()
    with simulation():
        program()
    assert mapped() - before < 2**30


def simulated_and_real_sizes() -> list[int]:
    with one_rank_of(4):
        inside = [dist.get_world_size(), dist.get_world_size(dist.new_group([0, 1, 2]))]
    total = torch.ones(())
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group())
    funcol.all_reduce(total, "sum", dist.group.WORLD).sum()
    return [*inside, dist.get_world_size(), int(total)]


def test_a_rank_of_a_real_group_simulates_another_one_and_is_in_its_own_again(worlds: WorldsBySize) -> None:
    """Under torchrun a formula that follows a simulated step is asked in such a process."""
    assert worlds(2).run(simulated_and_real_sizes) == [[4, 3, 2, 4]] * 2
