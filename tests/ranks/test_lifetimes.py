"""What worlds leave behind: no process, no file, no leak, no traffic beyond loopback; and torchrun's ranks."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from correctness.support.paths import ROOT
from correctness.support.waiting import wait_until
from shardmark.ranks.world import World, available_ranks
from tests.support.processes import is_running, listening_addresses
from tests.support.ranks import identity, scaled_sum


def environment() -> dict[str, int]:
    """Where a leak would show: open files, threads, and resident bytes of this rank."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": resident,
    }


def test_rendezvous_is_private_and_traffic_stays_on_loopback(device: str) -> None:
    if device == "cuda":
        pytest.skip("NCCL on one machine uses shared memory")
    with World(2) as world:
        directory = world._directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for addresses in world.run(listening_addresses):
            assert addresses == {"0100007F"}
    assert not directory.exists()


@pytest.mark.sweep
def test_a_thousand_calls_leave_everything_where_it_was(pair: World, device: str) -> None:
    def everyone() -> list[dict[str, int]]:
        return [environment(), *pair.run(environment)]

    tensor = torch.ones(2500)  # 10 KB: to leak one a call would be 10 MB in the end
    for _ in range(10):
        pair.run(scaled_sum, tensor, 1.0, device)
    before = everyone()
    for _ in range(990):
        pair.run(scaled_sum, tensor, 1.0, device)
    # Allocators are not exact to the page: ranks may differ by 0.2%. This process is pytest's as well.
    for early, late, room in zip(before, everyone(), (2**20, 2**19, 2**19), strict=True):
        assert (late["files"], late["threads"]) == (early["files"], early["threads"])
        assert late["resident"] - early["resident"] < room


SESSION = """
import os, sys, time
from tests.support.ranks import hang_in_c_with_the_interpreter_locked, identity
from shardmark.ranks import world
from shardmark.ranks.world import World
world.PRELOADED[1:] = ["shardmark.ranks.rank"]  # the rest takes seconds, and nobody here needs it
if __name__ == "__main__":
    worlds = [World(2), World(1)]
    worlds[0].run(identity)
    print(*[pid for world in worlds for pid in world.pids], worlds[0]._directory, flush=True)
    if sys.argv[1] == "hang":
        worlds[0].run(hang_in_c_with_the_interpreter_locked)
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="SIGKILL"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.sweep),
        pytest.param(None, id="normal_end", marks=pytest.mark.sweep),
    ],
)
def test_no_rank_outlives_the_process_that_started_it(end: signal.Signals | None, tmp_path: Path) -> None:
    """Not even ranks that hang in C, when that process gets no chance to clean up. TMPDIR has no room for a socket."""
    script, temporary = tmp_path / "session.py", tmp_path / ("a long näme" * 10)
    temporary.mkdir()
    script.write_text(SESSION)
    command = [sys.executable, str(script), "hang" if end else "finish"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    environment["GLOO_SOCKET_IFNAME"] = "nowhere0"  # worlds stay on the loopback interface whatever this says
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    *pids, directory = process.stdout.readline().decode().rstrip().split(" ", 3)
    pids = [int(pid) for pid in pids]
    if end:
        time.sleep(0.2)
        assert all(map(is_running, pids))
        process.send_signal(end)
    process.wait(timeout=20)
    if end is None:
        assert not Path(directory).exists()
    assert wait_until(lambda: not any(map(is_running, pids)))


def _children(pid: int) -> set[int]:
    """Every process below that one."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            child = int(status.parent.name)
            found |= {child} | _children(child)
    return found


def _clean_environment() -> dict[str, str]:
    """Ours, without what tells a pytest or a torchrun that it runs inside another."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCHELASTIC"))}


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "SIGTERM"])
def test_an_interrupted_run_keeps_its_rows_and_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    out, temporary = tmp_path / "out.json", tmp_path / "tmp"
    temporary.mkdir()
    arguments = [
        "perf/test_attention.py",
        "-v",
        "--scale=smoke",
        "-k",
        "eager or flash_pytorch",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            *arguments,
            f"--benchmark-json={out}",
            "--benchmark-max-time=3",
            "--device=cpu",
        ],
        cwd=ROOT,
        env=_clean_environment() | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and what they start inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert wait_until(out.exists, 60)  # the first row is on disk
    below = _children(process.pid)
    assert below
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and "KeyboardInterrupt" in output
    assert "What does attention cost as the sequence grows?" in output  # the table of what was measured
    assert '"implementation": "eager"' in out.read_text()
    assert wait_until(lambda: not any(map(is_running, below)))
    assert not list(temporary.glob("shardmark-*"))


@pytest.mark.sweep
def test_under_torchrun_its_ranks_are_the_world(device: str) -> None:
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = [
        "-m",
        "pytest",
        "-q",
        "correctness/collectives/test_collectives.py",
        "-k",
        "groups_side_by_side",
        f"--device={device}",
    ]
    tests += ["-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *tests], cwd=ROOT, env=_clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" passed") == 1  # rank 0 runs pytest, the others serve it


def test_temporary_files_are_all_in_the_private_directory(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with World(1, device) as world:
        world.run(identity)
        assert list(tmp_path.glob("*shardmark*")) == [world._directory]
    assert not world._directory.exists()
