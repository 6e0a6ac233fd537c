"""Runs in surroundings that lack something: what can be measured is, rows are kept, and nothing stays behind."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from correctness.support.processes import wait_until
from correctness.support.runs import Fresh, environment_of_a_run, forked, numbers, project
from shardmark.growing import GrowingFile

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def variables(**values: str | None) -> Callable[[Fresh], None]:
    return lambda run: run.environment.update(values)


def temporary_folder(name: str, there: bool = True) -> Callable[[Fresh], None]:
    def change(run: Fresh) -> None:
        folder = run.folder / name
        if there:
            folder.mkdir(parents=True)
        run.environment["TMPDIR"] = str(folder)

    return change


def without(*command: str) -> Callable[[Fresh], None]:
    """Below a command that takes something away."""

    def change(run: Fresh) -> None:
        if shutil.which(command[0]) is None or subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip(f"{command[0]} is not here, or may not do this")
        run.below = list(command)

    return change


def small(folder: str, size: str) -> Callable[[Fresh], None]:
    """With a tiny disk there, in a name space of its own; `{}` is the project's folder."""

    def change(run: Fresh) -> None:
        where = folder.format(run.folder)
        Path(where).mkdir(exist_ok=True)
        without("unshare", "-m")(run)
        run.below += ["sh", "-c", f'mount -t tmpfs -o size={size} none "{where}" && exec "$@"', "sh"]
        if where.startswith(str(run.folder)):
            run.environment["TMPDIR"] = where

    return change


def without_roots_rights(run: Fresh) -> None:
    """In a folder that its user may not write."""
    without("setpriv", "--bounding-set=-all", "--inh-caps=-all")(run)
    (run.folder / "tmp").mkdir()
    run.environment["TMPDIR"] = str(run.folder / "tmp")
    run.arguments = [f"--benchmark-json={run.folder}/tmp/out.json"]
    run.folder.chmod(0o555)


LACKS: dict[str, Callable[[Fresh], None]] = {
    "64 descriptors": lambda run: run.limits.update({resource.RLIMIT_NOFILE: 64}),
    "no HOME": variables(HOME=None),
    "a HOME that is gone": variables(HOME="/nowhere"),
    "LANG=C": variables(LANG="C", LC_ALL="C"),
    "no UTF-8": variables(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "TMPDIR with spaces": temporary_folder("a folder with späces"),
    "TMPDIR without room for a socket": temporary_folder("long" * 40),
    "TMPDIR that is not there": temporary_folder("nowhere", there=False),
    "TMPDIR that is full": small("{}/tiny", "16k"),
    "tiny /dev/shm": small("/dev/shm", "64k"),
    "a folder that may not be written": without_roots_rights,
}


def running(tag: str) -> list[str]:
    """Processes with that word in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if tag.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("lack", LACKS)
def test_a_run_that_lacks_it_measures_all_and_leaves_nothing(lack: str, tmp_path: Path) -> None:
    tag = uuid.uuid4().hex
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json"], {"RUN_TAG": tag})
    LACKS[lack](run)
    ended = run.run()
    tmp_path.chmod(0o755)
    assert ended.status == 0 and ended.has_table, ended.output
    (out,) = tmp_path.rglob("out.json")
    assert numbers(out) == [0, 1, 2]
    assert wait_until(lambda: not running(tag), 20)
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith((".out", "shardmark-", "pymp-"))]


@pytest.mark.sweep
def test_without_a_network_one_line_says_so_and_rows_are_kept(tmp_path: Path) -> None:
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json", "-rs"])
    without("unshare", "-n")(run)
    ended = run.run()
    assert ended.rows() == [0, 1, 2] and ended.has_table
    assert len(ended.lines("ranks talk over the loopback interface, and it is down")) == 1, ended.output


@pytest.mark.sweep
@pytest.mark.parametrize("stdout", [">/dev/full", ">&-", "| head -c 1"])
def test_where_nobody_reads_what_it_prints_the_file_is_whole(stdout: str, tmp_path: Path) -> None:
    """pytest ends where it cannot print."""
    tag = uuid.uuid4().hex
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json"], {"RUN_TAG": tag}, shell=stdout)
    ended = run.run()
    assert ended.rows() == list(range(len(ended.rows())))
    assert wait_until(lambda: not running(tag), 20)
    assert not list(tmp_path.glob(".out*"))


def too_small_for_three_rows() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))


def test_where_no_disk_has_room_the_first_rows_are_kept_and_all_are_in_the_table(tmp_path: Path) -> None:
    ended = forked(project(tmp_path), "--benchmark-json=out.json", "-k", "test_row", fault=too_small_for_three_rows)
    assert ended.status == 0 and ended.has_table
    kept = ended.rows()
    assert kept and kept == list(range(len(kept))) and len(kept) < 3
    (line,) = ended.lines("--benchmark-json: ")
    assert line.endswith(f"OSError: [Errno 27] File too large; only {len(kept)} of 3 rows are in out.json")
    assert [each.name for each in tmp_path.glob("*out*")] == ["out.json"]


def test_a_second_run_on_the_same_file_is_one_line_and_one_on_another_goes_on(tmp_path: Path) -> None:
    first = GrowingFile(project(tmp_path) / "out.json")
    try:
        for _ in range(2):
            second = forked(tmp_path, "--benchmark-json=out.json", "-k", "test_row")
            assert second.status == 4
            assert second.output.split("\n", 1)[0] == "ERROR: --benchmark-json out.json: another run is writing it"
            first.append({}, ["0"], [], count=1)
        assert forked(tmp_path, "--benchmark-json=other.json", "-k", "test_row").rows("other.json") == [0, 1, 2]
    finally:
        first.close()
    assert forked(tmp_path, "--benchmark-json=out.json", "-k", "test_row").rows() == [0, 1, 2]


def clock_jumps() -> None:
    import itertools
    import time

    days = itertools.cycle([0, 400, -400])
    now = time.time
    time.time = lambda: now() + 86_400 * next(days)


def test_a_clock_that_jumps_changes_no_row(tmp_path: Path) -> None:
    ended = forked(project(tmp_path), "--benchmark-json=out.json", "-k", "test_row", fault=clock_jumps)
    assert ended.status == 0 and ended.rows() == [0, 1, 2] and ended.has_table, ended.output


def test_a_path_that_is_no_text_is_printed_as_what_it_is(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\x1b[31m"))
    folder.mkdir()
    project(tmp_path)
    ended = forked(tmp_path, f"--benchmark-json={folder}/out.json", "-k", "test_row")
    assert ended.status == 0 and numbers(folder / "out.json") == [0, 1, 2]
    assert "\x1b" not in ended.output and len(ended.lines("3 rows in ")) == 1


DIES = """
import os, signal
import torch.distributed as dist
from test_costs import test_row  # its rows first

def die(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()

def test_world(worlds):
    worlds(2).run(die, int(os.environ["DYING"]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_that_dies_costs_no_row(rank: int, tmp_path: Path) -> None:
    project(tmp_path, test_dies=DIES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        "-m",
        "pytest",
        "--device=cpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "--benchmark-json=out.json",
        "test_dies.py",
    ]
    tag = uuid.uuid4().hex
    environment = environment_of_a_run(DYING=str(rank), RUN_TAG=tag)
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and numbers(tmp_path / "out.json") == [0, 1, 2]
    assert "(SIGABRT)" in run.stderr  # torchrun's own word of it
    assert rank == 0 or "case 0 " in run.stdout
    assert wait_until(lambda: not running(tag), 20)
