"""On several GPUs a worker for each measures what takes one; then the controller alone runs what takes a world."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness.support.paths import ROOT
from perf.conftest import pytest_cmdline_main
from shardmark.plugin import workers
from shardmark.rows.observers import Goals, Timeline
from shardmark.rows.observers.after_warmups import AfterWarmups
from shardmark.rows.observers.attention_parts import AttentionProfile
from tests.support.runs import CONFTEST, Ended, forked, project

SHARING = """
import pytest
from shardmark.plugin.workers import share_the_devices

@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    share_the_devices(config, 2)
"""

CASES = """
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import is_running
from shardmark.verdict.budget import MemoryBudget
from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory
from shardmark.rows.observers import Observer
from shardmark.meter.plan import IMPLEMENTATION, Identity, Measured
from shardmark.rows.columns import Column

@dataclass(frozen=True)
class Case:
    number: int

    def __str__(self):
        return f"case {self.number}"

class Seen(Observer):
    def __init__(self, judgements):
        self.judgements = judgements

    def fill(self, row, ranks):
        pids = [int(pid.name) for pid in Path("pids").iterdir()] if Path("pids").exists() else []
        row["seen"] = {
            "process": os.getpid(),
            "devices": os.environ["CUDA_VISIBLE_DEVICES"],
            "judgements": self.judgements,
            "others": [pid for pid in pids if pid != os.getpid() and is_running(pid)],
        }

    def lines(self, entries):
        yield f"{len(entries)} rows seen"

class Local(Observer):
    def __init__(self):
        self.cannot_be_pickled = lambda: None

DEVICES = Column("devices", lambda entry, row: row["seen"]["devices"] if "seen" in row else None)

def record(number, measure):
    ranks = [Measured("none", Memory(), {IMPLEMENTATION: [Laps(0.001 * (number + 1))] * 3})]
    observe = [Seen(measure._session.judgements), Local()]
    measure.record(Identity("none", "mine", Case(number), "cpu"), ranks, observe=observe)

@pytest.mark.question("What takes a world?", columns=["case", "time ms", DEVICES])
@pytest.mark.parametrize("number", [0, 1])
def test_on_a_world(number, worlds, measure):
    record(number, measure)
    assert len(worlds(2).run(os.getpid)) == 2

@pytest.mark.question("What takes a device?", columns=["case", "time ms", DEVICES])
@pytest.mark.parametrize("number", range(2, 8))
def test_on_a_device(number, measure):
    Path("pids").mkdir(exist_ok=True)
    Path("pids", str(os.getpid())).touch()
    time.sleep(0.1)  # so that the other worker has its share
    record(number, measure)
    assert number != 5

@pytest.mark.question("What takes a device?")
def test_too_large(measure):
    identity = Identity("none", "mine", Case(8), "cpu")
    measure.attempt(identity, MemoryBudget(10**17), list)
"""


def run(folder: Path, *arguments: str) -> Ended:
    """Run the project on two devices: those that CUDA_VISIBLE_DEVICES names, whatever the machine has."""
    project(folder, conftest=CONFTEST + SHARING, test_costs=CASES)
    return forked(folder, "--benchmark-json=out.json", *arguments, environment={"CUDA_VISIBLE_DEVICES": "5,7"})


BUDGETS = """
["*test_on_a_device*"]
bytes = 1
["*test_nowhere*"]
bytes = 1
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "budgets.toml").write_text(BUDGETS)
    return run(folder, "-vv", "--budgets=budgets.toml", "--benchmark-save=all")  # with tables, though runs are -q


@pytest.fixture(scope="module")
def rows(ended: Ended) -> dict[int, dict[str, Any]]:
    """Observations of each timed row, by its case."""
    entries = json.loads((ended.folder / "out.json").read_text())["benchmarks"]
    return {entry["extra_info"]["case"]["number"]: entry["extra_info"]["seen"] for entry in entries}


def test_every_row_is_in_the_one_file_with_its_times(ended: Ended) -> None:
    assert ended.status == 1 and "1 failed, 7 passed, 1 skipped" in ended.output, ended.output
    assert sorted(ended.rows()) == [*range(9)]
    output = json.loads((ended.folder / "out.json").read_text())
    assert [entry["extra_info"]["verdict"] for entry in output["unmeasured"]] == ["not started"]
    (saved,) = (ended.folder / ".benchmarks").rglob("*.json")
    assert len(json.loads(saved.read_text())["benchmarks"]) == len(output["benchmarks"]) == 8
    for entry in output["benchmarks"]:
        number = entry["extra_info"]["case"]["number"]
        assert entry["stats"]["data"] == [0.001 * (number + 1)] * 3
        assert entry["params"] == {"number": str(number)} and entry["options"]["timer"] == "device_clock"


def test_a_device_has_a_worker_and_each_worker_a_device(rows: dict[int, dict[str, Any]]) -> None:
    alone = [rows[number] for number in range(2, 8)]
    assert {seen["devices"] for seen in alone} == {"5,7", "7,5"}
    assert len({seen["process"] for seen in alone}) == 2


def test_a_world_has_every_device_to_itself(rows: dict[int, dict[str, Any]]) -> None:
    on_world = [rows[number] for number in range(2)]
    assert len({seen["process"] for seen in on_world} - {rows[number]["process"] for number in range(2, 8)}) == 1
    assert [(seen["devices"], seen["others"]) for seen in on_world] == [("5,7", [])] * 2


def test_verdicts_share_one_error_in_every_process(rows: dict[int, dict[str, Any]]) -> None:
    assert {seen["judgements"] for seen in rows.values()} == {9}


def test_what_perf_observes_goes_by_pickle() -> None:
    for observer in (
        AttentionProfile({"scores": 1, "softmax": 1, "values": 1}),
        AfterWarmups({0: [1.0]}),
        Timeline(),
        Goals(mfu=0.5),
    ):
        assert workers._pickles(observer)


def test_each_question_has_one_table_of_all_its_rows(ended: Ended) -> None:
    assert [len(ended.lines(f"- What takes a {what}? -")) for what in ("device", "world")] == [1, 1]
    assert len(ended.lines("7,5")) + len(ended.lines("5,7")) == 8
    assert all(len(ended.lines(line)) == 1 for line in ("2 rows seen", "7 rows seen", "9 rows in "))
    (unmatched,) = ended.lines("no measured test matches")
    assert "test_nowhere" in unmatched


@pytest.mark.sweep
def test_a_run_that_is_to_end_early_does_not_come_to_worlds(tmp_path: Path) -> None:
    ended = run(tmp_path, "-x", "-k", "5 or 0")
    assert ended.status != 0 and ended.rows() == [5], ended.output


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("chosen", "status", "numbers"), [("device and 2", 0, [2]), ("world and 1", 0, [1]), ("neither", 5, [])]
)
def test_a_run_may_have_one_kind_or_none(chosen: str, status: int, numbers: list[int], tmp_path: Path) -> None:
    ended = run(tmp_path, "-k", chosen)
    assert (ended.status, ended.rows()) == (status, numbers), ended.output


@pytest.mark.parametrize(
    ("arguments", "option", "number"),
    [
        (["perf"], {}, 4),
        (["perf/test_loss.py::test_goals", "perf/test_optim.py"], {}, 4),
        (["perf"], {"ranks": "2,3"}, 3),
        (["perf"], {"ranks": "1"}, None),
        (["perf"], {"device": "cpu"}, None),
        (["perf"], {"benchmark_disable": True}, None),
        (["perf"], {"usepdb": True}, None),
        (["perf"], {"against": "old.json"}, None),
        (["perf"], {"numprocesses": 0}, 0),
        (["perf", "correctness"], {}, None),
    ],
)
def test_perf_has_a_worker_for_each_gpu(
    arguments: list[str], option: dict[str, Any], number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(workers.torchrun, "launched", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    given = {"numprocesses": None, "tx": [], "usepdb": False, "trace": False, "capture": "fd", "collectonly": False}
    given |= {"benchmark_disable": False, "benchmark_skip": False, "device": "auto", "ranks": None}
    given |= {"against": None, "against_ref": None}
    options = Namespace(**(given | option))
    plugins = Namespace(register=lambda plugin, name: None)
    place = Namespace(dir=ROOT)
    pytest_cmdline_main(Namespace(option=options, args=arguments, invocation_params=place, pluginmanager=plugins))
    assert options.numprocesses == number
