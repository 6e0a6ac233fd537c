"""Runs on other machines: each is made of this one or says why not, and none outlives its time."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from correctness.support.waiting import wait_until
from tests import machines
from tests.machines import MACHINES, NotHereError, Run
from tests.support.processes import is_running


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_made_or_says_in_one_line_why_not(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, {"PATH": os.environ["PATH"]})
    try:
        MACHINES[name](run)
    except NotHereError as error:
        reason = str(error)
        assert reason and "\n" not in reason
        pytest.skip(reason)
    assert run != Run(tmp_path, {"PATH": os.environ["PATH"]}), "it is this machine"
    assert (run.root / "conftest.py").exists()


def test_a_path_without_compilers_has_all_other_commands(tmp_path: Path) -> None:
    commands, links = tmp_path / "bin", tmp_path / "links"
    kept = {"ls", "clangd", "gcc-ranlib-12", "bccat", "dcc2"}
    for name in {"cc", "gcc", "g++-12", "c++", "clang++", "x86_64-linux-gnu-g++", "clang-19.1"} | kept:
        (commands / name).parent.mkdir(exist_ok=True)
        (commands / name).touch(mode=0o755)
    links.mkdir()
    run = Run(links, {"PATH": f"{commands}:/nowhere", "CXX": "g++"})
    machines.no_compiler(run)
    assert {path.name for path in links.iterdir()} == kept and run.environment == {"PATH": str(links)}
    assert shutil.which("ls", path=str(links)) == str(links / "ls")


HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def test_a_run_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "LONGEST", 2.0)
    monkeypatch.setattr(machines, "PATIENCE", 0.1)
    began = time.monotonic()
    status, line = machines._follow([sys.executable, "-c", HANGS], Run(tmp_path, dict(os.environ)))
    assert (status, line) == (-signal.SIGKILL, "ended after 2 s") and time.monotonic() - began < 50
    child = int(capfd.readouterr().out)
    assert wait_until(lambda: not is_running(child))


def test_the_last_line_and_the_exit_status_are_a_runs_own(tmp_path: Path) -> None:
    run = Run(tmp_path, dict(os.environ), root=tmp_path)
    assert machines._follow([sys.executable, "-c", "print('one'); print(); exit(3)"], run) == (3, "one")


def test_what_it_prints_may_be_of_any_encoding(tmp_path: Path) -> None:
    run = Run(tmp_path, dict(os.environ))
    command = [sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'\xe4\n')"]
    assert machines._follow(command, run) == (0, "�")
