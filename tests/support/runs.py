"""Runs of pytest in processes of their own, with something wrong: a signal, a limit, a disk, a folder, an environment.

ended = forked(folder, "-k", "row", fault=Fault)   # torch is imported already: tenths of a second
ended = fresh(folder, environment={"HOME": None})  # as a user starts it: seconds
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from correctness.support.paths import ROOT
from shardmark.ranks.world import PRELOADED

CONFTEST = """
from shardmark.ranks import world

pytest_plugins = ["shardmark.plugin"]
world.PRELOADED[2:] = ["shardmark.ranks.rank"]  # the rest takes seconds, and nobody here needs it

def pytest_benchmark_generate_machine_info():
    return {"node": "here", "cpu": {}}  # to ask the processor takes a second

def pytest_benchmark_generate_commit_info():
    return {}
"""

ROWS = """
import os
from dataclasses import dataclass

import pytest

from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, Identity, Measured

@dataclass(frozen=True)
class Case:
    number: int

    def __str__(self):
        return f"case {self.number}"

def size_and_pid():
    import torch.distributed as dist
    return dist.get_world_size(), os.getpid()

@pytest.mark.question("What does a row cost?", columns=["case", "time ms"])
@pytest.mark.parametrize("number", range(3))
def test_row(number, measure):
    laps = [Laps(0.001)] * 300  # a row of two pages
    measure.record(Identity("none", "mine", Case(number), "cpu"), [Measured("none", Memory(), {IMPLEMENTATION: laps})])

def test_world(worlds):
    assert [size for size, _ in worlds(2).run(size_and_pid)] == [2, 2]
"""
OPTIONS = ("--device=cpu", "-p", "no:cacheprovider", "--benchmark-quiet", "-q")

ENDS = signal.SIGTERM, signal.SIGHUP
"""A run below nohup ignores the second."""

LIMIT = 300.0
"""Seconds after which a run counts as hung."""


@dataclass(frozen=True)
class Ended:
    """A run that is over: its exit status, negative where a signal ended it, and all that it printed."""

    status: int
    output: str
    folder: Path

    def rows(self, name: str = "out.json") -> list[int]:
        """The cases in the file; json.JSONDecodeError where it is torn."""
        path = self.folder / name
        return numbers(path) if path.exists() else []

    @property
    def has_screen(self) -> bool:
        return any(line.startswith("- What does a row cost? ") for line in self.output.splitlines())

    def lines(self, text: str) -> list[str]:
        return [line for line in self.output.splitlines() if text in line]


def numbers(path: Path) -> list[int]:
    """The cases of the rows in that file."""
    entries = json.loads(path.read_text())
    return [entry["extra_info"]["case"]["number"] for entry in [*entries["benchmarks"], *entries["unmeasured"]]]


def project(folder: Path, **files: str) -> Path:
    """A project of someone's own with three rows of made-up times, and one test of a world."""
    for name, text in {"conftest": CONFTEST, "test_costs": ROWS, **files}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def forked(
    folder: Path,
    *arguments: str,
    fault: Callable[[], object] | None = None,
    environment: Mapping[str, str | None] = MappingProxyType({}),
) -> Ended:
    """A run of the project, after `fault`, a function of a module or a frozen dataclass, has been called in it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    printed = folder / "printed"
    process = context.Process(
        target=_run, args=(folder, arguments, fault, environment_of_a_run(**environment), printed)
    )
    process.start()
    process.join(LIMIT)
    hung = process.is_alive()
    process.kill()
    process.join()
    assert not hung and process.exitcode is not None, printed.read_text()
    output = printed.read_text(errors="replace")
    printed.unlink()
    return Ended(process.exitcode, output, folder)


def _run(
    folder: Path,
    arguments: Sequence[str],
    fault: Callable[[], object] | None,
    environment: dict[str, str],
    printed: Path,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.dont_write_bytecode = True  # a fork: Python has read its variable long ago
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    import pytest

    if fault is not None:
        fault()
    sys.exit(int(pytest.main([*OPTIONS, *arguments])))


def environment_of_a_run(**changes: str | None) -> dict[str, str]:
    """Ours, without what tells a pytest or a torchrun that it runs inside another; None removes a variable.

    The number of workers stays: as one of them, a run has its share of the cores. No bytecode: its files are no rows,
    though they are renamed as those are.
    """
    inner = ("PYTEST_", "TORCHELASTIC")
    kept = "PYTEST_XDIST_WORKER_COUNT"
    ours = {name: value for name, value in os.environ.items() if name == kept or not name.startswith(inner)}
    path = os.pathsep.join(filter(None, (str(ROOT), ours.get("PYTHONPATH"))))  # tox -e fake_gpu, no_triton: it has more
    changed = {**ours, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **changes}
    return {name: value for name, value in changed.items() if value is not None}


def torchrun(*options: str) -> list[str]:
    """The command below which a run is two ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options, "--no-python"]


@dataclass
class Fresh:
    """How a run is to be started."""

    folder: Path
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)
    below: list[str] = field(default_factory=list)
    """The command that starts the run, and its arguments."""
    limits: dict[int, int] = field(default_factory=dict)
    """Limits by their number in `resource`."""
    stdout: Any = subprocess.PIPE
    shell: str | None = None
    """Shell text after the command, such as a redirection."""

    def start(self) -> subprocess.Popen[str]:
        command = [*self.below, sys.executable, "-m", "pytest", *OPTIONS, *self.arguments]
        if self.shell is not None:
            command = ["sh", "-c", f'exec "$@" {self.shell}', "sh", *command]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment_of_a_run(**self.environment),
            stdout=self.stdout,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=self._prepare,
        )

    def run(self) -> Ended:
        process = self.start()
        try:
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
        return Ended(process.returncode, output or "", self.folder)

    def _prepare(self) -> None:
        import resource

        for number in (signal.SIGINT, *ENDS):  # a shell's background jobs ignore the first
            signal.signal(number, signal.SIG_DFL)
        for limit, value in self.limits.items():
            resource.setrlimit(limit, (value, value))
