"""--trace-dir as a user meets it: the files, and what the rows say of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.meter.roofline import Roofline
from tests.support.project import make_project, run_project

pytest_plugins = ["pytester"]

PROJECT = """
from dataclasses import dataclass

import pytest
from torch import nn, ones, optim
from shardmark.api import Grid, Work
from shardmark.rows.observers import Profile
from shardmark.api.registry import Family, add_family, register


class Contract: ...


@dataclass(frozen=True)
class Case:
    size: int
    dtype: str = "float32"

    def __str__(self):
        return f"size/{self.size}"


add_family(Family("layer", Contract, reference="linear", check=lambda target, device: None))
register("layer", "linear", nn.Linear, memory=lambda case: 10**6)


class Step:
    backend = "none"

    def __init__(self, implementation, case, device):
        self.model = nn.Sequential(implementation.target(case.size, case.size), nn.ReLU())
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1)

    def prepare(self):
        self.optimizer.zero_grad()

    def step(self, mark):
        loss = self.model(ones(1, self.model[0].in_features)).sum()
        mark("forward")
        loss.backward()
        mark("backward")
        self.optimizer.step()
        mark("optimizer")


CASES = Grid(smoke=[Case(4), Case(8)], laptop=[], paper=[])


@pytest.mark.family("layer")
@pytest.mark.question("What does a layer cost?")
@pytest.mark.cases(CASES)
def test_layer(implementation, case, measure):
    measure(Step, implementation, case, work=Work(flops=1))


@pytest.mark.family("layer")
@pytest.mark.cases(CASES)
def test_kernels(implementation, case, world, measure):
    measure(
        Step, implementation, case, work=Work(flops=1), world_size=world.size,
        observe=[Profile(lambda profile: {"phases": profile.as_row()})],
    )
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose family is a layer, on hardware of known rates."""
    rates = Roofline(flops_per_second=1e9, peak_flops_per_second=1e9, bytes_per_second=1e9)
    monkeypatch.setattr("shardmark.plugin.session.Session.roofline", lambda self, dtype: rates)
    return make_project(pytester, monkeypatch, 'pytest_plugins = ["shardmark.plugin"]', test_own=PROJECT)


def _run(project: pytest.Pytester, *args: str) -> tuple[pytest.RunResult, dict[str, dict[str, Any]]]:
    """Run the project in this process; rows by test name."""
    result, output = run_project(project, "--scale=smoke", "--benchmark-min-rounds=2", *args)
    return result, {entry["name"]: entry["extra_info"] for entry in output["benchmarks"]}


def _ranges(path: Path) -> set[str]:
    """Names of the trace's ranges. Raises where the file is not what chrome://tracing and Perfetto read: JSON whose
    complete events have a name, a process, a thread, and in microseconds a beginning and a duration."""
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert complete and all({"name", "pid", "tid", "ts", "dur"} <= event.keys() for event in complete)
    assert all(isinstance(event[name], int | float) for event in complete for name in ("ts", "dur"))
    return {event["name"] for event in complete if event.get("cat") == "user_annotation"}


def test_each_case_and_rank_has_a_trace_with_its_phases_and_modules(project: pytest.Pytester) -> None:
    result, rows = _run(project, "--trace-dir=new/traces", "--ranks=2", "-k", "test_layer or 4-2ranks")
    result.assert_outcomes(passed=3)
    named = {name: row["trace"] for name, row in rows.items()}
    assert named["test_layer[linear-size/4]"] == ["size_4-linear.json"]
    assert named["test_layer[linear-size/8]"] == ["size_8-linear.json"]
    ranks = named["test_kernels[linear-size/4-2ranks]"]  # of the same case, so with a digest of the test's id
    assert [name.rpartition(".rank")[2] for name in ranks] == ["0.json", "1.json"]
    files = sorted((project.path / "new" / "traces").iterdir())
    assert [file.name for file in files] == sorted(
        name for each in named.values() for name in each
    )  # on CPU there are no snapshots
    for file in files:
        assert {"forward", "backward", "optimizer", "Sequential", "0", "1"} <= _ranges(file)
    assert (
        "kernels" not in rows["test_layer[linear-size/4]"] and "kernels" in rows["test_kernels[linear-size/4-2ranks]"]
    )


def test_kernels_are_in_the_row_and_under_the_table(project: pytest.Pytester) -> None:
    result, rows = _run(project, "-v", "--ranks=1", "-k", "test_kernels and size/4")
    result.assert_outcomes(passed=1)
    row = rows["test_kernels[linear-size/4-1ranks]"]
    assert "trace" not in row and list(row["kernels"]["phases"]) == ["forward", "backward", "optimizer"]
    (product,) = [k for k in row["kernels"]["phases"]["forward"]["top"] if k["name"] == "aten::addmm"]
    assert product["calls"] == 1 and product["category"] == "matrix product" and 0 < product["share"] < 1
    result.stdout.fnmatch_lines(
        [
            "size/4  linear: kernels by phase",
            "phase * share * calls * total ms * kernel * category",
            "forward *%  * 1 * aten::addmm * matrix product",
            "of * total ms * matrix products * attention * softmax * everything else",
            "optimizer * 0.0% * 0.0% * 0.0% * 100.0%",
            "forward + backward * 0.0% *",
            "forward + backward + optimizer * 0.0% *",
        ]
    )
