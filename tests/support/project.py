"""A project of someone's own that uses the plugin: a family of naps, its tests, and runs of them in this process."""

import json
import os
from functools import cache
from typing import Any

import hypothesis  # noqa: F401  (or its plugin imports it at the end of each run, as `pytester` forgets it again)
import pytest
import pytest_benchmark.plugin
import torch._dynamo  # noqa: F401  (what runs may import first, and cannot import twice)

from correctness.support.paths import ROOT
from shardmark.api import registry
from shardmark.meter import clock
from shardmark.meter.disturbances import Threads

CONFTEST = """
import impl
pytest_plugins = ["shardmark.plugin"]
"""

SLEEPS = """
import itertools
from dataclasses import dataclass

import pytest
import torch
from shardmark.api import Grid, Work
from shardmark.plugin.measure import memory_budget
from shardmark.meter import clock
from shardmark.meter.memory import Memory
from shardmark.rows.observers import Goals, Observer
from shardmark.meter.measure_case import timed_steps
from shardmark.meter.plan import IMPLEMENTATION, Measured, Plan, Rounds
from shardmark.api.registry import Family, Race, Unsupported, add_family, register
from shardmark.rows.columns import Column


class Contract: ...


@dataclass(frozen=True)
class Naps:
    length: float
    nbytes: int = 4000
    dtype: str = "float32"

    def __str__(self):
        return f"{self.length}s"


add_family(Family("sleep", Contract, reference="plain", check=lambda target, device: None))


def formula(case):
    return case.nbytes


register("sleep", "plain", 1.0, memory=formula, time=Race("slow", budget=0.9))
register("sleep", "slow", 4.0, memory=formula, time=Race("plain", budget=2.0), called="a slow nap")
register("sleep", "greedy", 1.0, memory=lambda case: formula(case) // 2)
register("sleep", "with_giant", 1.0, memory=formula, time=Race("giant", budget=0.9))
register("sleep", "giant", 2.0, memory=lambda case: 10**17, requires=(lambda device: None,))
register("sleep", "elsewhere", 1.0, memory=formula, requires=(lambda device: "needs another planet",))
register("sleep", "dreamt", 1.0, memory=formula, requires_to_measure=(lambda device: "dreams take no time",))
register("sleep", "light", None, memory=formula)
long = Race("plain", budget=2.0, goal=1.0, applies=lambda case, device: case.length > 1)
register("sleep", "excused", 4.0, memory=formula, time=long)
register("sleep", "alone", 1.0, memory=formula, time=Race("light", budget=1.0))
register("sleep", "torn", (1.0, 4.0), memory=formula, time=Race("plain", budget=2.0))  # its median is between


class Sleep:
    backend = "none"

    def __init__(self, implementation, case, device):
        target = implementation.target
        lengths = target if type(target) is tuple else (target,)
        self.lengths = target and itertools.cycle(case.length * length for length in lengths)
        self.kept = torch.empty(1000) if case.nbytes < 2**50 else torch.empty(case.nbytes)

    def prepare(self):
        pass

    def step(self, mark):
        if self.lengths is None:
            raise Unsupported("light sleeps are not timed")
        clock.time.sleep(next(self.lengths))
        mark("forward")
        mark("backward")


GRID = Grid(smoke=[Naps(0.005)], laptop=[Naps(0.005), Naps(0.01)], paper=[Naps(0.005), Naps(0.005, nbytes=10**17)])


@pytest.mark.family("sleep")
@pytest.mark.question("How long is a nap?")
@pytest.mark.cases(GRID)
def test_nap(implementation, case, measure):
    rates = lambda seconds: {"flops_per_second": 10 / seconds}
    measure(Sleep, implementation, case, work=Work(flops=10, bytes_moved=10), rates=rates)


@pytest.mark.family("sleep")
@pytest.mark.cases(GRID)
def test_strict(implementation, case, measure):
    measure(Sleep, implementation, case, work=Work(flops=10), time=Race("slow", budget=1e-6))


@pytest.mark.family("sleep", only=("plain", "torn", "with_giant"))
@pytest.mark.question("Are goals reached?")
@pytest.mark.cases(GRID)
def test_goal(implementation, case, measure):
    race = Race("slow", goal=0.1 if implementation.name == "with_giant" else 0.5)
    amount = Work(flops=10, model_flops=10)
    measure(Sleep, implementation, case, work=amount, time=race, observe=[Goals(mfu=0.5, fraction=1e-12)])


@pytest.mark.family("sleep")
def test_dream(implementation): ...


@pytest.mark.family("sleep", only=("plain", "slow"))
def test_some(implementation): ...


@pytest.mark.family("sleep", only=("slow",))
def test_another(implementation): ...


@pytest.mark.family("sleep", only=("plain",))
@pytest.mark.cases(GRID)
def test_rounds(implementation, case, measure):
    amount = Work(flops=10, model_flops=5)
    own = Rounds(minimum=3, maximum=3, warmups=1)
    measure(Sleep, implementation, case, work=amount, rounds=own, time=Race("slow"))


@pytest.mark.family("sleep", only=("plain",))
@pytest.mark.cases(GRID)
def test_half_of_the_peak(implementation, case, measure):
    own, amount = Rounds(minimum=3, maximum=3, warmups=1), Work(flops=10, model_flops=5)
    measure(Sleep, implementation, case, work=amount, rounds=own, time=Race("plain"), observe=[Goals(mfu=0.5)])


class FirstStep(Observer):
    def fill(self, row, ranks):
        row["time"]["first"] = ranks[0].laps[IMPLEMENTATION][0].seconds

    def lines(self, entries):
        yield f"{len(entries)} rows of first steps"


FIRST = Column("first s", lambda entry, row: f"{row['time']['first']:.2f}" if "first" in row["time"] else None)


@pytest.mark.family("sleep", only=("plain", "giant"))
@pytest.mark.question("How long is the first nap?", columns=["case", FIRST, "verdict"])
@pytest.mark.cases(GRID)
def test_first_steps(implementation, case, device, measure):
    plan = Plan(Sleep, implementation, None, case, device, 1)
    memory = memory_budget(implementation, case, device)
    laps = measure.attempt(plan.identity, memory, lambda: timed_steps(plan, 4))
    measure.record(plan.identity, [Measured("none", Memory(), {IMPLEMENTATION: laps})], observe=[FirstStep()])
"""


class Asleep:
    """Time that passes in naps alone, so that no other program's load decides a verdict; like the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


ask_the_processor = cache(pytest_benchmark.plugin.get_cpu_info)
"""Once for all runs, as that takes tenths of a second."""


def make_project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, conftest: str, **files: str
) -> pytest.Pytester:
    """A project of one's own that uses the plugin, with a family of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--device=cpu")  # whatever this machine has
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # or pytest-benchmark disables itself in there
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))  # its own family goes with it
    monkeypatch.setattr(pytest_benchmark.plugin, "get_cpu_info", ask_the_processor)
    pytester.makeconftest(conftest)
    pytester.makepyfile(**files)
    return pytester


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose family sleeps, by a clock of its own and beside nobody: what fails on a busy machine is
    undecided."""
    monkeypatch.setattr(clock, "time", Asleep())
    monkeypatch.setattr(Threads, "waited", lambda *since: 0.0)
    return make_project(pytester, monkeypatch, CONFTEST, test_sleeps=SLEEPS)


def run_project(project: pytest.Pytester, *args: str) -> tuple[pytest.RunResult, dict[str, Any]]:
    """A run in this process, and its JSON."""
    rounds = ("--benchmark-min-rounds=7", "--benchmark-max-time=0.01", "--benchmark-quiet")
    result = project.runpytest_inprocess("--device=cpu", *rounds, "--benchmark-json=out.json", *args)
    out = project.path / "out.json"
    return result, json.loads(out.read_text()) if out.exists() else {}


def row_of(output: dict[str, Any], name: str) -> dict[str, Any]:
    entries = [*output["benchmarks"], *output["unmeasured"]]
    (row,) = [entry["extra_info"] for entry in entries if name in entry["name"]]
    return row
