"""Ended and interrupted runs leave no process and no file; torchrun's ranks are a world."""

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from correctness.support.waiting import wait_until
from shardmark.ranks.world import available_ranks
from tests.support.processes import is_running, running
from tests.support.runs import Fresh, environment_of_a_run, torchrun

SESSION = """
import os, sys
from tests.support.ranks import hang_in_c_with_the_interpreter_locked, start_a_sleeper
from shardmark.ranks import world
from shardmark.ranks.world import World
world.PRELOADED[2:] = ["shardmark.ranks.rank"]  # the rest takes seconds, and nobody here needs it

def leave_the_group_and_hang(group):
    os.setpgid(0, group)
    hang_in_c_with_the_interpreter_locked()

if __name__ == "__main__":
    worlds = [World(2), World(1)]
    started = worlds[0].run(start_a_sleeper if sys.argv[1] == "hang" else os.getpid)
    print(*started, *[pid for world in worlds for pid in world.pids], worlds[0]._directory, flush=True)
    if sys.argv[1] == "hang":
        worlds[0].run(leave_the_group_and_hang, os.getpgrp())
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="SIGKILL"),
        pytest.param(None, id="normal_end", marks=pytest.mark.sweep),
    ],
)
def test_no_rank_outlives_the_process_that_started_it(end: signal.Signals | None, tmp_path: Path) -> None:
    """Not even ranks that hang in C and have left their process group, nor processes that ranks started, when that
    process gets no chance to clean up. TMPDIR has no room for a socket."""
    script, temporary = tmp_path / "session.py", tmp_path / ("a long näme" * 10)
    temporary.mkdir()
    script.write_text(SESSION)
    command = [sys.executable, str(script), "hang" if end else "finish"]
    # Worlds stay on the loopback interface whatever GLOO_SOCKET_IFNAME says.
    environment = environment_of_a_run(TMPDIR=str(temporary), GLOO_SOCKET_IFNAME="nowhere0")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    *numbers, directory = process.stdout.readline().rstrip().split(" ", 5)
    pids = [int(number) for number in numbers]
    if end:
        time.sleep(0.2)
        assert all(map(is_running, pids))
        process.send_signal(end)
    process.wait(timeout=20)
    if end is None:
        assert not Path(directory).exists()
    assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "SIGTERM"])
def test_an_interrupted_run_keeps_its_rows_and_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    out, temporary, tag = tmp_path / "out.json", tmp_path / "tmp", uuid.uuid4().hex
    temporary.mkdir()
    arguments = ["perf/test_attention.py", "-vv", "--scale=smoke", "-k", "eager or flash_pytorch"]
    arguments += [f"--benchmark-json={out}", "--benchmark-max-time=3"]
    process = Fresh(ROOT, arguments, {"TMPDIR": str(temporary), "RUN_TAG": tag}).start()
    assert wait_until(out.exists, 60)  # the first row is on disk
    assert len(running(tag)) > 1
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and "KeyboardInterrupt" in output
    assert "What does attention cost as the sequence grows?" in output  # the table of what was measured
    assert '"implementation": "eager"' in out.read_text()
    assert wait_until(lambda: not running(tag))
    assert not list(temporary.glob("shardmark-*"))


@pytest.mark.sweep
def test_under_torchrun_its_ranks_are_the_world(device: str) -> None:
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    arguments = ["correctness/collectives/test_collectives.py", "-k", "groups_side_by_side", f"--device={device}"]
    ended = Fresh(ROOT, arguments, below=torchrun("--standalone")).run()
    assert ended.status == 0, ended.output
    assert ended.output.count(" passed") == 1  # rank 0 runs pytest, the others serve it
