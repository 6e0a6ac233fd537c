"""A run's files, read by other programs: pytest-benchmark, GitHub's benchmark action, JUnit, Nsight; a row's schema."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest
import torch
from pytest_benchmark.cli import main as pytest_benchmark

from perf.schema import complaints
from shardmark.api.registry import Implementation
from shardmark.meter import measure_case as passes
from shardmark.meter.clock import Laps
from shardmark.meter.gpu import GpuWatch
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, PEER, Plan, Rounds
from tests.support.entries import entry
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def test_others_read_the_file(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pytest-benchmark compare`, and the tool "pytest" of benchmark-action/github-action-benchmark, whose
    extractPytestResult takes a name and four numbers of each benchmark."""
    run_project(project, "--scale=paper", "-k", "nap and (plain or alone)")  # one of them is not started
    shutil.copy("out.json", "older.json")
    monkeypatch.setattr(sys, "argv", ["pytest-benchmark", "compare", "older.json", "out.json"])
    pytest_benchmark()
    printed = capsys.readouterr().out
    assert printed.count("test_nap[plain-0.005s0]") == 2

    output = json.loads(Path("out.json").read_text(), parse_constant=refuse)
    assert len(output["unmeasured"]) == 2
    names = [benchmark["fullname"] for benchmark in output["benchmarks"]]
    assert len({*names}) == len(names) == 2
    for benchmark in output["benchmarks"]:
        figures = [benchmark["stats"][name] for name in ("ops", "stddev", "mean", "rounds")]
        assert all(isinstance(figure, int | float) and math.isfinite(figure) for figure in figures)
        assert figures[0] == pytest.approx(1 / figures[2])


def test_junit_has_each_rows_main_figures(project: pytest.Pytester) -> None:
    chosen = "nap and (plain or greedy or elsewhere)"
    _, output = run_project(project, "--scale=smoke", "-k", chosen, "--junitxml=junit.xml")
    cases = {case.get("name"): case for case in ElementTree.parse("junit.xml").iter("testcase")}
    found = {
        name: {each.get("name"): each.get("value") for each in case.iter("property")} for name, case in cases.items()
    }
    row, entries = row_of(output, "plain"), {each["name"]: each for each in output["benchmarks"]}
    assert found["test_nap[plain-0.005s]"] == {
        "stats.median": str(entries["test_nap[plain-0.005s]"]["stats"]["median"]),
        **{
            "family": "sleep",
            "implementation": "plain",
            "case.id": "0.005s",
            "world_size": "1",
            "verdict": row["verdict"],
        },
        **{"time.peer": "slow", "time.ratio": str(row["time"]["ratio"])},
        **{"memory.tensors": "4000", "memory.peak": "4000", "memory.budget": "4200"},
    }
    assert found["test_nap[greedy-0.005s]"]["verdict"] == "fail"
    assert cases["test_nap[greedy-0.005s]"].find("failure") is not None
    assert not found["test_nap[elsewhere-0.005s]"]


class Step:
    backend = "none"

    def prepare(self) -> None: ...

    def step(self, mark: Any) -> None: ...


def test_nvtx_names_each_case_and_each_timed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is mocked here."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("-"))
    monkeypatch.setattr(passes, "timed_step", lambda *args: Laps(0.0))
    monkeypatch.setattr(passes, "shuffled", lambda names, coin: names)
    monkeypatch.setattr(passes, "meter_pass", lambda plan: (Step(), Memory(peaks={"first": 0}), 0.0))
    monkeypatch.setattr(passes, "count", lambda *args: None)
    monkeypatch.setattr(passes, "release", lambda device: None)
    monkeypatch.setattr(passes, "GpuWatch", lambda device: GpuWatch("cpu"))
    ours, peer = (Implementation("none", name, None) for name in ("ours", "theirs"))
    plan = Plan(lambda *args: Step(), ours, peer, "size/4", "cuda", 1, Rounds(minimum=2, maximum=2))
    measured = passes.measure(plan)
    assert told == ["size/4 ours", *["ours step", "-", "theirs step", "-"] * 2, "-"]
    assert {IMPLEMENTATION, PEER} == measured.laps.keys()
    told.clear()
    passes.measure(Plan(lambda *args: Step(), ours, peer, "size/4", "cpu", 1, Rounds(minimum=1, maximum=1)))
    assert told == []


def test_rows_meet_the_schema_whatever_came_of_them(project: pytest.Pytester) -> None:
    """Pass, fail, not started; goals; rounds too few for an interval; the project's own observer aside."""
    few = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.000001")
    _, output = run_project(project, "--scale=paper", "-k", "goal or (nap and (plain or greedy or excused))", *few)
    rows = [each["extra_info"] for each in (*output["benchmarks"], *output["unmeasured"])]
    assert {"pass", "fail", "not started"} <= {row["verdict"] for row in rows}
    assert [line for row in rows for line in complaints(row)] == []


WRONG: dict[str, tuple[Any, str]] = {
    "verdict": ("passed", "$.verdict: 'passed' is not one of *"),
    "memory.peak": (-1, "$.memory.peak: -1 is less than the minimum of 0"),
    "time.interval": ([1.0], "$.time.interval: [1.0] is not valid under any of the given schemas"),
    "work.flops": (None, "$.work.flops: None is not of type 'integer'"),
    "memory.peek": (1, "$.memory: *'peek' was unexpected*"),
    "schema": (0, "$.schema: 2 was expected"),
}


@pytest.mark.parametrize("place", WRONG)
def test_a_field_that_does_not_meet_the_schema_is_named(place: str) -> None:
    value, complaint = WRONG[place]
    row = entry("eager", tensors=1)["extra_info"]
    assert list(complaints(row)) == []
    section, _, name = place.rpartition(".")
    (row[section] if section else row)[name] = value
    pytest.LineMatcher([*complaints(row)]).fnmatch_lines([complaint.replace("[", "[[]", 1)])
