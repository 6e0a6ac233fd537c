"""Each observer: what it runs on the ranks, its part of the row, and its lines; rows that are measured otherwise."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from correctness.support.metering import plan_of
from correctness.support.paths import ROOT
from impl.data_parallel.accounting import best_bucket_bytes, exposed_seconds
from shardmark.api import stage
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter import recompile as cold
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import measure
from shardmark.meter.memory import Memory, Stage
from shardmark.meter.plan import COMMUNICATION, COMPUTE, IMPLEMENTATION, Measured, Plan, Rounds
from shardmark.plugin import WorldsBySize
from shardmark.rows.observers import (
    Compile,
    ExposedCommunication,
    Goals,
    HiddenCommunication,
    Losses,
    Observer,
    Profile,
    Stages,
    Timeline,
)
from shardmark.rows.observers.after_warmups import AfterWarmups, after_warmups
from shardmark.rows.observers.overhead_model import OverheadModel
from shardmark.rows.row import Row
from tests.support.measured import row_by
from tests.support.project import make_project, run_project

pytest_plugins = ["pytester"]

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


class Plain:
    """The step of a linear layer, without any method that an observer needs."""

    backend = "none"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.model = nn.Linear(10, 10)
        stage("model")

    def prepare(self) -> None:
        self.model.zero_grad()

    def step(self, mark: Mark) -> None:
        loss = self.model(torch.ones(1, 10)).sum()
        mark("forward")
        loss.backward()
        mark("backward")


class Able(Plain):
    """With every method that an observer needs."""

    def kinds(self) -> dict[str, list[Tensor]]:
        CALLS.append("kinds")
        return {"parameters": list(self.model.parameters())}

    def compute_step(self, mark: Mark) -> None:
        CALLS.append("compute")
        self.step(mark)

    def communication_step(self, mark: Mark) -> None:
        CALLS.append("communication")


ONE = Rounds(minimum=1, maximum=1, warmups=1)


def _plan(*observers: type[Observer], **options: Any) -> Plan:
    return plan_of(Able, rounds=ONE, observers=observers, **options)


def _laps(*seconds: float) -> dict[str, list[Laps]]:
    return {IMPLEMENTATION: [Laps(each) for each in seconds]}


ALONE = [Measured("none", Memory(), _laps(1.0))]
"""One rank's single step of a second."""


@pytest.mark.parametrize(
    ("observer", "method"),
    [(Timeline(), "kinds"), (ExposedCommunication(), "compute_step"), (HiddenCommunication(), "compute_step")],
    ids=lambda value: type(value).__name__ if isinstance(value, Observer) else value,
)
def test_what_a_workload_lacks_is_one_line(observer: Observer, method: str) -> None:
    said = f"{type(observer).__name__} needs Plain.{method}(), which is not defined"
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        observer.check(Plain)
    observer.check(Able)


def test_nothing_is_run_that_no_observer_asks_for() -> None:
    measured = measure(_plan())
    assert not CALLS and not measured.observed and set(measured.laps) == {IMPLEMENTATION}
    assert "before_first_step" not in measured.memory.phases


@pytest.mark.parametrize(
    ("observer", "timed"), [(ExposedCommunication, {COMPUTE}), (HiddenCommunication, {COMPUTE, COMMUNICATION})]
)
def test_what_is_alone_is_timed_in_the_same_rounds(observer: type[Observer], timed: set[str]) -> None:
    measured = measure(_plan(observer))
    assert set(measured.laps) == {IMPLEMENTATION, *timed}
    assert {call for call in CALLS if call != "kinds"} == timed


def test_a_step_that_marks_no_communication_has_what_is_left_of_it() -> None:
    laps = {IMPLEMENTATION: [Laps(5.0, {"step": 5.0})], COMPUTE: [Laps(3.0, {"step": 3.0})]}
    row = row_by(ExposedCommunication(), [Measured("none", Memory(), laps)])
    assert row["time"]["parts"] == {"step": 3.0, "communication": 2.0}


class Named(Observer):
    """Holds a function that cannot be sent to a rank."""

    def __init__(self) -> None:
        self.told = lambda rank: f"rank {rank}"

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> int:
        return dist.get_rank()

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        row["names"] = [self.told(rank.observed[type(self)]) for rank in ranks]


def test_only_its_class_travels_to_the_ranks(worlds: WorldsBySize) -> None:
    ranks = worlds(2).run(measure, _plan(Named, ranks=2))
    assert row_by(Named(), ranks)["names"] == ["rank 0", "rank 1"]


def test_profile_gives_the_first_ranks_and_names_all_ranks_files(worlds: WorldsBySize, tmp_path: Path) -> None:
    ranks = worlds(2).run(measure, _plan(Profile, ranks=2, trace=tmp_path / "step"))
    row = row_by(Profile(lambda profile: {"phases": profile.as_row()}), ranks)
    assert list(row["kernels"]["phases"]) == ["forward", "backward"]
    assert row["trace"] == ["step.rank0.json", "step.rank1.json"] == sorted(file.name for file in tmp_path.iterdir())
    ranks = [measure(_plan(Profile))]
    assert "kernels" not in (row := row_by(Profile(), ranks)) and "trace" not in row


def test_timeline_is_the_first_ranks_and_stands_beside_its_formulas(worlds: WorldsBySize) -> None:
    ranks = worlds(2).run(measure, _plan(Timeline, ranks=2))
    assert ranks[1].observed[Timeline] is None
    memory = row_by(Timeline({("nowhere", "aten::nothing"): 7}), ranks)["memory"]
    assert memory["kinds"]["before_step"]["parameters"] == 4 * (10 * 10 + 10)
    assert {"module": "nowhere", "operator": "aten::nothing", "bytes": 0, "formula": 7} in memory["activations"]
    assert set(memory) == {"kinds", "curve", "activations", "largest"}


def test_stages_are_of_the_rank_that_holds_most_beside_their_formulas() -> None:
    held = ({"model": Stage(4, 5), "wrapping": Stage(9, 9)}, {"model": Stage(6, 7), "wrapping": Stage(8, 8)})
    ranks = [Measured("gloo", Memory(stages=stages), _laps(1.0)) for stages in held]
    assert row_by(Stages({"model": 6}), ranks)["memory"]["stages"] == {
        "model": {"live": 6, "peak": 7, "reserved": None, "formula": 6},
        "wrapping": {"live": 9, "peak": 9, "reserved": None, "formula": None},
    }


def test_stages_of_a_workload_that_reports_none_are_one_line() -> None:
    with pytest.raises(TypeError, match=r"^Stages: long was made without a call of shardmark.api.stage$"):
        Stages({}).fill(row_by(Losses([]), ALONE), ALONE)


def test_stages_are_the_workloads_own_and_the_warm_up() -> None:
    row = row_by(Stages({}), [measure(_plan(Stages))])
    assert list(row["memory"]["stages"]) == ["model", "warm-up"]


def test_compile_has_the_compiler_forget_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_load_compiler", lambda device: None)  # which would take seconds
    before = cache_dir()
    with Compile.around(_plan(Compile)):
        assert cache_dir() != before
    assert cache_dir() == before


def test_compile_is_the_first_step_beyond_the_median_on_the_slowest_rank() -> None:
    def rank(tensors: int, first: float | None) -> Measured:
        memory = Memory(tensors=tensors, peaks={"first": 2 * tensors})
        return Measured("none", memory, _laps(1.0, 2.0, 3.0), observed={Compile: first})

    row = row_by(Compile(), [rank(5, 10.0), rank(6, 12.0)])
    assert row["memory"]["peaks"] == {"first": 12}
    assert (row["time"]["first_step"], row["time"]["compile"]) == (12.0, 10.0)
    assert "compile" not in row_by(Compile(), [rank(5, None)])["time"]  # nothing was compiled


def test_goals_are_reached_or_missed_by_the_interval_of_the_step_time() -> None:
    ranks = [Measured("none", Memory(), _laps(*[1.0] * 9))]
    row = row_by(Observer(), ranks)
    row["limit"] = {"mfu": 0.5, "fraction": 0.8}
    Goals(mfu=0.45, fraction=0.9).fill(row, ranks)
    outcomes = {name: goal["outcome"] for name, goal in row["limit"]["goals"].items()}
    assert outcomes == {"mfu": "reached", "fraction": "missed"}
    Goals(mfu=0.45).fill(row, ALONE)
    assert row["limit"]["goals"]["mfu"]["outcome"] == "undecided"  # a single round decides nothing
    assert Goals().min_rounds == 8


@pytest.mark.parametrize(("per_byte", "bandwidth"), [(1e-9, 1e9), (0.0, None)], ids=["clear", "hidden_by_noise"])
def test_the_overhead_model_is_the_line_through_the_all_reduces(per_byte: float, bandwidth: float | None) -> None:
    kilobytes = (4, 64, 1024)
    parts = {f"{size} KB": 1e-4 + per_byte * size * 1024 for size in kilobytes}
    model = OverheadModel(2**20, kilobytes, (1,), best_bucket_bytes, exposed_seconds)
    row = row_by(model, [Measured("gloo", Memory(), {IMPLEMENTATION: [Laps(1.0, parts)]})])
    fitted = row["time"].get("model")
    assert (fitted and fitted["bandwidth"]) == (bandwidth and pytest.approx(bandwidth, rel=1e-3))


def test_rounds_after_warm_ups_are_means_in_columns_of_their_own() -> None:
    row = row_by(AfterWarmups({0: [0.5, 0.7], 1: [0.2, 0.2]}), ALONE)
    assert row["time"]["after_warmups"]["1"] == {"mean": 0.2, "stddev": 0.0}
    column = after_warmups(0)
    assert (column.name, column.cell({}, row)) == ("0 warm-ups", "600.0 ± 141.4")
    assert column.brief is not None and column.brief({}, row) == "600.0"
    assert after_warmups(5).cell({}, row) is None


OWN = """
import pytest
from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory
from shardmark.rows.observers import Losses
from shardmark.meter.plan import IMPLEMENTATION, Identity, Measured


class Counts(Losses):
    def lines(self, entries):
        yield f"{len(entries)} rows, {len(self.losses)} losses"


@pytest.mark.question("How do we do it ourselves?")
@pytest.mark.parametrize("name", ["one", "two"])
def test_own(name, measure):
    measured = Measured("by hand", Memory(), {IMPLEMENTATION: [Laps(0.5)]})
    measure.record(Identity("own", name, "a case", "cpu", 3), [measured], observe=[Counts([2.0, 1.0])])
"""


def test_a_row_is_saved_without_an_implementation_or_a_plan(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(pytester, monkeypatch, 'pytest_plugins = ["shardmark.plugin"]', test_own=OWN)
    result, output = run_project(project, "--scale=smoke", "-v")
    result.assert_outcomes(passed=2)
    rows = [entry["extra_info"] for entry in output["benchmarks"]]
    what = [[row[name] for name in ("family", "implementation", "backend", "world_size")] for row in rows]
    assert what == [["own", name, "by hand", 3] for name in ("one", "two")]
    assert [row["losses"] for row in rows] == [[2.0, 1.0]] * 2
    result.stdout.fnmatch_lines(["*How do we do it ourselves?*", "2 rows, 2 losses"])


@pytest.mark.sweep
def test_the_attention_backends_of_a_run_are_in_its_machine_info(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the suite's own conftest: shardmark records what ran for any family, and names none."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # or pytest-benchmark disables itself in there
    test, out = ROOT / "perf" / "test_attention.py", pytester.path / "out.json"
    chosen = f"{test}::test_memory_by_length[eager-b2-s128-d32-full-float32-both]"
    result = pytester.runpytest_subprocess(
        *(f"--rootdir={ROOT}", "-c", ROOT / "pytest.ini", "--scale=smoke", "--device=cpu", "-p", "no:cacheprovider"),
        *("--benchmark-json", out, chosen),
    )
    result.assert_outcomes(passed=1)
    assert json.loads(out.read_text())["machine_info"]["attention_backend"] == "eager"
