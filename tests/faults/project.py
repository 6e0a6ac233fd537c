"""A project of someone's own in which every fault happens in every part of a test, and a run of it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from correctness.support.waiting import wait_until
from tests.faults.that_stay import FOLDER, shared_memory_prefix
from tests.support.processes import running
from tests.support.runs import Fresh

PHASES = ("setup", "step", "teardown", "measured")
OTHERS = "torchinductor_", "pytest-of-"
"""How temporary files begin that PyTorch and pytest keep."""

CONFTEST = """
import json, os
import pytest
from shardmark.api.registry import Family, add_family, register

pytest_plugins = ["shardmark.plugin"]


class Contract: ...


add_family(Family("nap", Contract, reference="short", check=lambda target, device: None))
register("nap", "short", None, memory=lambda case: 10**6)


def write(**line):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open("outcomes.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")


def pytest_runtest_logreport(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    text = "" if report.passed else crash.message if crash else str(report.longrepr)
    write(test=report.nodeid, when=report.when, outcome=report.outcome, text=text, seconds=report.duration)


def pytest_warning_recorded(warning_message, when, nodeid, location):
    if warning_message.category.__name__ == "LeftBehind":
        write(test=nodeid, warning=str(warning_message.message))
"""

TESTS = """
from dataclasses import dataclass

import pytest
import torch

from tests.faults.rank_faults import FAULTS, state
from shardmark.api.grid import Grid
from shardmark.api.work import Work
from shardmark.meter.plan import Rounds

SIZE = {size}
CASES = {cases}
EXPECTED = []
TO_IMPORT = 5.0  # seconds in which the ranks have imported this module


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str = "float32"

    def __str__(self):
        return self.name


class Nap:
    backend = "none"

    def __init__(self, implementation, case, device):
        self.name = case.name

    def prepare(self): ...

    def step(self, mark):
        if self.name in FAULTS:
            FAULTS[self.name].function()
        mark("forward")
        mark("backward")


def run(world, name):
    world.run(FAULTS[name].function, deadline=FAULTS[name].deadline)


def is_as_ever(world):
    torch.manual_seed(1)
    found = world.run(state)
    EXPECTED[:] = EXPECTED or [found]
    assert found == EXPECTED[0]


def test_before_all(worlds):
    is_as_ever(worlds(SIZE))


@pytest.fixture
def faulty(request, worlds):
    name, phase, part = request.param
    if phase == "setup" and part == "fault":
        run(worlds(SIZE), name)
    yield name, phase, part
    if phase == "teardown" and part == "fault":
        run(worlds(SIZE), name)


@pytest.mark.parametrize(
    "faulty",
    [(name, phase, part) for name, phase in CASES if phase != "measured" for part in ("fault", "after")],
    ids="-".join,
    indirect=True,
)
def test_ranks(faulty, worlds):
    name, phase, part = faulty
    if part == "after":
        is_as_ever(worlds(SIZE))
    elif phase == "step":
        run(worlds(SIZE), name)


MEASURED = [Case("first"), *(Case(name) for name, phase in CASES if phase == "measured"), Case("last")]


@pytest.mark.family("nap")
@pytest.mark.cases(Grid(smoke=MEASURED, laptop=[], paper=[]))
def test_row(implementation, case, measure, monkeypatch):
    if case.name in FAULTS:
        monkeypatch.setattr(type(measure), "deadline", FAULTS[case.name].deadline + TO_IMPORT)
    rounds = Rounds(minimum=3, maximum=3, warmups=1)
    measure(Nap, implementation, case, work=Work(flops=1), world_size=SIZE, rounds=rounds)
"""


@dataclass
class Outcome:
    """One test's failures by part, each with its line; its warnings; and its seconds."""

    failed: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Run:
    """One run of the project, and what it left behind."""

    outcomes: dict[str, Outcome]
    rows: dict[str, Any] | None
    left: list[str]


def run_faults(folder: Path, size: int, cases: Iterable[tuple[str, str]], *options: str) -> Run:
    """Run pytest on a project in `folder` in which each fault happens, in each phase, on `size` ranks."""
    project, temporary = folder / "project", folder / "tmp"
    project.mkdir()
    temporary.mkdir()
    (project / "conftest.py").write_text(CONFTEST)
    (project / "test_faults.py").write_text(TESTS.format(size=size, cases=list(cases)))
    arguments = ["--scale=smoke", "--benchmark-json=out.json", f"--rootdir={project}", *options]
    Fresh(project, arguments, {FOLDER: str(folder), "TMPDIR": str(temporary)}).start().communicate()
    out = project / "out.json"
    rows = json.loads(out.read_text()) if out.exists() else None
    return Run(_outcomes(project / "outcomes.jsonl"), rows, _left(folder))


def _outcomes(file: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        outcome = found.setdefault(line["test"].partition("::")[2], Outcome())
        outcome.seconds += line.get("seconds", 0.0)
        if "warning" in line:
            outcome.warnings.append(line["warning"])
        elif line["outcome"] != "passed":
            outcome.failed[line["when"]] = line["text"]
    return found


def _left(folder: Path) -> list[str]:
    """Processes, temporary files and shared memory that are there when they have had time to end."""
    of_this_run = f"{FOLDER}={folder}\0"
    wait_until(lambda: not running(of_this_run))
    processes = [f"process {pid}" for pid in running(of_this_run)]
    files = [str(file) for file in (folder / "tmp").iterdir() if not file.name.startswith(OTHERS)]
    shared = [str(file) for file in Path("/dev/shm").glob(f"{shared_memory_prefix(str(folder))}*")]
    return processes + files + shared
