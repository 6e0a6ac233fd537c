"""A project whose rows have the figures that a file gives them: nothing is measured, so a run takes tenths of a second.

run = plant(project, a=figures(), b=figures(ratio=2.0))
"""

import json
from typing import Any

import pytest

from tests.support.project import make_project
from tests.support.runs import CONFTEST

ROWS = """
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmark.verdict.budget import MemoryBudget
from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory, Workspace
from shardmark.rows.observers import Observer
from shardmark.meter.plan import IMPLEMENTATION, LOAD, PEER, Identity, Measured
from shardmark.api.registry import Race

FIGURES = json.loads(Path("figures.json").read_text())


@dataclass(frozen=True)
class Case:
    name: str

    def __str__(self):
        return self.name


class Counters(Observer):
    def __init__(self, counters):
        self.counters = counters

    def fill(self, row, ranks):
        row["counters"] = self.counters


@pytest.mark.parametrize("name", FIGURES)
def test_row(name, measure):
    figures = FIGURES[name]
    if figures is None:
        pytest.skip("not here")
    laps = {IMPLEMENTATION: [Laps(figures["ratio"] * noise) for noise in figures["noise"]]}
    if figures["peer"] is not None:
        laps[PEER] = [Laps(1.0) for noise in figures["noise"]]
    if figures["load"] is not None:
        laps[LOAD] = [Laps(figures["load"]) for noise in figures["noise"]]
    memory = Memory(tensors=figures["tensors"], workspace=Workspace(figures["workspace"], "mm"))
    measure.record(
        Identity("none", "mine", Case(name), figures["device"]),
        [Measured("none", memory, laps, waited=figures["waited"])],
        time=Race(figures["peer"]),
        again=lambda: [[Measured("none", memory, laps)] for _ in range(3 if figures["fresh"] else 0)],
        memory=MemoryBudget(10**9),
        observe=[Counters(figures["counters"])],
    )
"""
ALL_REDUCES = ["all_reduce", "float32", 1000, 2]
FIGURES = {
    "ratio": 1.0,
    "noise": [1.0, 1.01] * 60,
    "peer": "theirs",
    "load": None,
    "waited": 0.0,
    "fresh": True,
    "tensors": 4000,
    "workspace": 1000,
    "device": "cpu",
    "counters": {
        "collectives": [ALL_REDUCES, ["reduce_scatter", "float32", 500, 1]],
        "bytes_sent": 2500,
        "operators": 10,
        "kernels": None,
        "bytecodes": 1000,
        "library_bytecodes": 10_000,
        "instructions": 10**6,
    },
}


def figures(**changed: Any) -> dict[str, Any]:
    """A row's, with other ones; counters may be changed one by one."""
    counters = {**FIGURES["counters"], **changed.pop("counters", {})}  # type: ignore[dict-item]
    return {**FIGURES, **changed, "counters": counters}


@pytest.fixture
def planted(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The project, whose rows are to be planted."""
    return make_project(pytester, monkeypatch, CONFTEST, test_planted=ROWS)


def run(project: pytest.Pytester, *arguments: str, **rows: dict[str, Any] | None) -> pytest.RunResult:
    """A run on rows of these figures, by name; one of None is skipped."""
    (project.path / "figures.json").write_text(json.dumps(rows))
    return project.runpytest_inprocess("--device=cpu", "-p", "no:cacheprovider", "--benchmark-quiet", *arguments)
