"""Runs in surroundings that lack something: what can be measured is, rows are kept, and nothing stays behind."""

import json
import os
import resource
import shutil
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from correctness.support.waiting import wait_until
from shardmark.rows.atomic_json import GrowingFile
from tests.support.processes import running
from tests.support.runs import Fresh, forked, numbers, project


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
    """Start the run by a command that takes something away."""

    def change(run: Fresh) -> None:
        if shutil.which(command[0]) is None or subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip(f"{command[0]} is not here, or may not do this")
        run.below = list(command)

    return change


def small(folder: str, size: str) -> Callable[[Fresh], None]:
    """Mount a tiny disk there, in a namespace of the run's own; `{}` is the project's folder."""

    def change(run: Fresh) -> None:
        where = folder.format(run.folder)
        Path(where).mkdir(exist_ok=True)
        without("unshare", "-m")(run)
        run.below += ["sh", "-c", f'mount -t tmpfs -o size={size} none "{where}" && exec "$@"', "sh"]
        if where.startswith(str(run.folder)):
            run.environment["TMPDIR"] = where

    return change


NOT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""This user owns all that root owns, Python too, and has no other right."""


def where_only_tmp_may_be_written(*command: str) -> Callable[[Fresh], None]:
    """Start the run by a command after which it may write its TMPDIR, and not the project's folder."""

    def change(run: Fresh) -> None:
        without(*command)(run)
        temporary_folder("tmp")(run)
        run.arguments = [f"--benchmark-json={run.folder}/tmp/out.json"]
        run.folder.chmod(0o555)

    return change


def read_only_checkout(run: Fresh) -> None:
    """Mount Shardmark and the project read-only."""
    where_only_tmp_may_be_written("unshare", "-m")(run)
    mounted = f'mount --bind "{run.folder}/tmp" "{run.folder}/tmp"'
    for folder in (ROOT, run.folder):
        mounted += f' && mount --rbind "{folder}" "{folder}" && mount -o remount,ro,bind "{folder}"'
    run.below += ["sh", "-c", f'{mounted} && exec "$@"', "sh"]


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
    "root's rights": where_only_tmp_may_be_written("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
    "a user who is root": where_only_tmp_may_be_written(*NOT_ROOT),
    "a checkout that may be written": read_only_checkout,
}


@pytest.mark.sweep
@pytest.mark.parametrize("lack", LACKS)
def test_a_run_that_lacks_it_measures_all_and_leaves_nothing(lack: str, tmp_path: Path) -> None:
    tag = uuid.uuid4().hex
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json"], {"RUN_TAG": tag})
    LACKS[lack](run)
    ended = run.run()
    tmp_path.chmod(0o755)
    assert ended.status == 0 and ended.has_screen, ended.output
    (out,) = tmp_path.rglob("out.json")
    assert numbers(out) == [0, 1, 2]
    assert wait_until(lambda: not running(tag), 20)
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith((".out", "shardmark-", "pymp-"))]


@pytest.mark.sweep
def test_what_a_user_who_is_not_root_may_not_write_is_one_line(tmp_path: Path) -> None:
    (project(tmp_path) / "older.json").write_text("older")
    (tmp_path / "older.json").chmod(0o400)
    tmp_path.chmod(0o555)
    for option in ("--benchmark-json=new.json", "--benchmark-json=older.json", "--trace-dir=new", "--link=1gbit"):
        run = Fresh(tmp_path, [option])
        without(*NOT_ROOT)(run)
        ended = run.run()
        assert ended.status == 4 and [line[:7] for line in ended.output.splitlines() if line] == ["ERROR: "]
    assert (tmp_path / "older.json").read_text() == "older" and not list(tmp_path.glob("*new*"))


@pytest.mark.sweep
def test_a_user_whose_warnings_are_errors_has_ranks(tmp_path: Path) -> None:
    ended = Fresh(project(tmp_path), ["-k", "world"], {"PYTHONWARNINGS": "error"}).run()
    assert ended.status == 0 and "1 passed" in ended.output


@pytest.mark.sweep
def test_without_a_network_a_test_of_ranks_fails_in_one_line_and_rows_are_kept(tmp_path: Path) -> None:
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json"])
    without("unshare", "-n")(run)
    ended = run.run()
    assert (ended.status, ended.rows()) == (1, [0, 1, 2]) and ended.has_screen, ended.output
    told = ended.lines("ranks talk over the loopback interface, and it is down: ip link set lo up")
    assert len(told) == 2 and "Traceback" not in ended.output  # as the failure, and on the screen


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stdout", "least"), [(">/dev/full", 1), (">&-", 0), ("2>/dev/full", 3), ("| (head -c 1; exit 1)", 1)]
)
def test_where_nobody_reads_what_it_prints_the_file_is_whole(stdout: str, least: int, tmp_path: Path) -> None:
    """pytest ends where it cannot print: at the first test, or before it where it has no standard output at all."""
    tag = uuid.uuid4().hex
    run = Fresh(project(tmp_path), ["--benchmark-json=out.json"], {"RUN_TAG": tag}, shell=stdout)
    ended = run.run()
    assert ended.rows() == list(range(len(ended.rows()))) and len(ended.rows()) >= least
    assert (ended.status == 0) == (least == 3)
    assert wait_until(lambda: not running(tag), 20)
    assert not list(tmp_path.glob(".out*"))


def too_small_for_three_rows() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))


def test_where_no_disk_has_room_the_first_rows_are_kept_and_all_are_in_the_table(tmp_path: Path) -> None:
    ended = forked(project(tmp_path), "--benchmark-json=out.json", "-k", "test_row", fault=too_small_for_three_rows)
    assert ended.status == 1 and ended.has_screen
    kept = ended.rows()
    assert kept and kept == list(range(len(kept))) and len(kept) < 3
    line, last = ended.lines("--benchmark-json: ")
    assert line == last and line.endswith(
        f"OSError: [Errno 27] File too large; only {len(kept)} of 3 rows are in out.json"
    )
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


WAITS = """
import time
from pathlib import Path

def test_wait():
    Path("waiting").touch()
    while not Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2])
def test_two_runs_at_once_write_two_files_and_never_one(workers: int, tmp_path: Path) -> None:
    """pytest-benchmark measures nothing in pytest-xdist's workers, so there are no rows."""
    rows = [] if workers else [0, 1, 2]
    project(tmp_path, test_waits=WAITS)
    both = [f"-n{workers}", "test_costs.py"]
    first = Fresh(tmp_path, ["--benchmark-json=out.json", *both, "test_waits.py"]).start()
    try:
        assert wait_until((tmp_path / "waiting").exists, 100)
        second = Fresh(tmp_path, ["--benchmark-json=out.json", *both]).run()
        assert second.status == 4 and len(second.lines("--benchmark-json out.json: another run is writing it")) == 1
        other = Fresh(tmp_path, ["--benchmark-json=other.json", *both]).run()
        assert (other.status, other.rows("other.json")) == (0, rows), other.output
    finally:
        (tmp_path / "go").touch()
        output, _ = first.communicate()
    assert (first.returncode, other.rows()) == (0, rows), output
    assert not list(tmp_path.glob(".o*"))


ODD = """
import math
import numpy as np
import pytest

class Speechless:
    def __repr__(self):
        raise LookupError("no text")

loop = []
loop.append(loop)
ODD = {"nan": math.nan, "scalar": np.float32(1.5), "speechless": Speechless(), "loop": loop, "keys": {(1, 2): {3}}}

@pytest.mark.parametrize("name", ODD)
def test_odd(name, benchmark):
    benchmark.extra_info[name] = ODD[name]
    benchmark.pedantic(int, rounds=1)
"""


def test_what_json_has_no_word_for_is_text_in_its_own_row(tmp_path: Path) -> None:
    options = ("--benchmark-json=out.json", "--benchmark-save=all", "-k", "test_odd or test_row")
    ended = forked(project(tmp_path, test_odd=ODD), *options)
    assert ended.status == 1 and ended.has_screen, ended.output
    assert len(ended.lines("--benchmark-save: LookupError: no text")) == 2  # pytest-benchmark's own file
    entries = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["benchmarks"]
    assert [list(entry["extra_info"].values()) for entry in entries if entry["name"].startswith("test_odd")] == [
        *([None], ["1.5"], ["Speechless (LookupError)"], [["[[...]]"]], [{"(1, 2)": "{3}"}])
    ]
    assert len([entry for entry in entries if entry["name"].startswith("test_row")]) == 3


def clock_jumps() -> None:
    import itertools
    import time

    days = itertools.cycle([0, 400, -400])
    now = time.time
    time.time = lambda: now() + 86_400 * next(days)


def test_a_clock_that_jumps_changes_no_row(tmp_path: Path) -> None:
    ended = forked(project(tmp_path), "--benchmark-json=out.json", "-k", "test_row", fault=clock_jumps)
    assert ended.status == 0 and ended.rows() == [0, 1, 2] and ended.has_screen, ended.output


def test_a_path_that_is_no_text_is_printed_as_what_it_is(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\x1b[31m"))
    folder.mkdir()
    project(tmp_path)
    ended = forked(tmp_path, f"--benchmark-json={folder}/out.json", "-k", "test_row")
    assert ended.status == 0 and numbers(folder / "out.json") == [0, 1, 2]
    assert "\x1b" not in ended.output and len(ended.lines("3 rows in ")) == 1
