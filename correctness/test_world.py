"""Worlds of ranks: results, errors, deadlines, replacement, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardmark import world as world_module
from shardmark.rank import WorldError
from shardmark.world import RankError, World, Worlds, available_ranks

ROOT = Path(__file__).parent.parent


def identity() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def scaled_sum(tensor: torch.Tensor, factor: float, device: str) -> torch.Tensor:
    tensor = tensor.to(device) * factor * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.cpu()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LookupError("no such shard")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def hang_in_c_with_the_interpreter_locked() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def kill_on_rank_1(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        sys.exit("usage: shard [-h]")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> tuple:
        raise ValueError


def raise_what_cannot_be_told() -> None:
    raise Speechless


def draw() -> float:
    return torch.rand(()).item()


def load_with_a_worker() -> list[int]:
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    return [batch.item() for batch in loader]


def return_a_lambda() -> object:
    return lambda: None


def environment() -> dict[str, int]:
    """What a leak would show in: open files, threads, and resident bytes of this rank."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": resident,
    }


def listening_addresses() -> set[str]:
    """Local addresses of this rank's TCP sockets, as hexadecimal; 0100007F is 127.0.0.1."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


@pytest.fixture
def pair(device: str) -> Iterator[World]:
    """A world of two that the test may break."""
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    with World(2, device) as world:
        yield world


def _is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_results_come_in_rank_order(pair: World) -> None:
    assert [(rank, size) for rank, size, _ in pair.run(identity)] == [(0, 2), (1, 2)]


def test_arguments_and_results_are_copied(pair: World, device: str) -> None:
    ones = torch.ones(3)
    for result in pair.run(scaled_sum, ones, 10.0, device):
        assert torch.equal(result, torch.full((3,), 30.0))
    assert torch.equal(ones, torch.ones(3))


def test_ranks_stay_between_calls(pair: World) -> None:
    assert pair.run(identity) == pair.run(identity)
    assert [pid for _, _, pid in pair.run(identity)] == pair.pids


def test_an_exception_arrives_with_its_ranks_own_traceback(pair: World) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(raise_on_rank_1)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 raised LookupError: no such shard\nTraceback (most recent call last):\n")
    assert 'raise LookupError("no such shard")' in text  # the user's own line
    assert "rank 0 of 2 had not answered" in text and "in raise_on_rank_1" in text.split("rank 0 of 2")[1]
    assert caught.value.rank == 1 and isinstance(caught.value.exception, LookupError)


def test_a_hang_is_reported_with_every_ranks_stack(pair: World) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pair.run(hang_on_rank_1, deadline=0.5)
    assert time.monotonic() - began < 0.5 + 2 * world_module.GRACE
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} of 2 had not answered after 0.5 s; it was at\n(.*\n)*?.*hang_on_rank_1", str(caught.value)
        )


def test_a_hang_in_c_shows_its_stack_too(pair: World) -> None:
    with pytest.raises(RankError, match="in hang_in_c_with_the_interpreter_locked"):
        pair.run(hang_in_c_with_the_interpreter_locked, deadline=0.5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_is_named_with_its_signal(pair: World, number: signal.Signals) -> None:
    with pytest.raises(RankError, match=f"rank 1 of 2 was killed by {number.name}"):
        pair.run(kill_on_rank_1, int(number))


def test_a_rank_that_crashes_leaves_its_stack(pair: World) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1 of 2 was killed by SIGSEGV\nFatal Python error.*in crash_on_rank_1"
    ):
        pair.run(crash_on_rank_1)


@pytest.mark.parametrize("function", [raise_on_rank_1, hang_on_rank_1, crash_on_rank_1])
def test_a_failure_ends_every_rank_and_the_next_test_gets_a_new_world(
    function: Callable[[], None], device: str
) -> None:
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    worlds = Worlds(device)
    before = worlds.get(2)
    pids, directory = before.pids, before._directory
    with pytest.raises(RankError):
        before.run(function, deadline=0.5)
    assert not any(map(_is_running, pids)) and not directory.exists()
    after = worlds.get(2)
    assert after is not before and [rank for rank, _, _ in after.run(identity)] == [0, 1]
    worlds.close()
    assert not any(map(_is_running, after.pids))


def test_a_rank_that_died_between_tests_is_replaced(device: str) -> None:
    worlds = Worlds(device)
    before = worlds.get(1)
    pids = before.pids
    os.kill(pids[0], signal.SIGKILL)
    assert _wait_until(lambda: not before.alive)
    assert worlds.get(1).run(identity)[0][2] not in pids
    worlds.close()


def test_what_cannot_be_sent_is_one_line_and_the_world_lives_on(pair: World) -> None:
    with pytest.raises(WorldError, match="module-level functions") as caught:
        pair.run(lambda: None)
    assert "\n" not in str(caught.value)
    assert pair.alive and pair.run(identity)


def test_a_result_that_cannot_be_sent_is_the_ranks_error(pair: World) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 raised .*[Pp]ickle"):
        pair.run(return_a_lambda)


def test_a_function_that_exits_is_told_of(pair: World) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 raised SystemExit: usage: shard \[-h\]\nTraceback"):
        pair.run(exit_on_rank_1)


def test_an_exception_that_cannot_be_told_is_named(pair: World) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 raised .*Speechless") as caught:
        pair.run(raise_what_cannot_be_told)
    assert caught.value.exception is None


def test_a_closed_world_says_so(pair: World) -> None:
    pair.close()
    with pytest.raises(WorldError, match="this world is closed"):
        pair.run(identity)


def test_ranks_draw_numbers_of_their_own(pair: World) -> None:
    first, second = pair.run(draw)
    assert first != second


def test_a_rank_may_have_children(pair: World) -> None:
    assert pair.run(load_with_a_worker) == [[0, 1, 2, 3]] * 2


def test_a_world_too_large_is_one_line(device: str) -> None:
    allowed = available_ranks(device)
    with pytest.raises(WorldError, match=rf"{allowed + 1} .*{allowed}") as caught:
        World(allowed + 1, device)
    assert "\n" not in str(caught.value)
    with pytest.raises(WorldError, match="at least one rank, not 0"):
        World(0, device)


def test_rendezvous_is_private_and_traffic_stays_on_loopback(device: str) -> None:
    if device == "cuda":
        pytest.skip("NCCL on one machine uses shared memory")
    with World(2) as world:
        directory = world._directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for addresses in world.run(listening_addresses):
            assert addresses == {"0100007F"}
    assert not directory.exists()


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
from correctness.test_world import hang_in_c_with_the_interpreter_locked, identity
from shardmark.world import World
if __name__ == "__main__":
    worlds = [World(2), World(1)]
    worlds[0].run(identity)
    print(*[pid for world in worlds for pid in world.pids], worlds[0]._directory, flush=True)
    if sys.argv[1] == "hang":
        worlds[0].run(hang_in_c_with_the_interpreter_locked)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "normal_end"])
def test_no_rank_outlives_the_process_that_started_it(end: signal.Signals | None, tmp_path: Path) -> None:
    """Not even ranks that hang in C, when that process gets no chance to clean up."""
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    command = [sys.executable, str(script), "hang" if end else "finish"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment["GLOO_SOCKET_IFNAME"] = "nowhere0"  # worlds stay on the loopback interface whatever this says
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    *pids, directory = process.stdout.readline().decode().split()
    pids = [int(pid) for pid in pids]
    if end:
        time.sleep(0.2)
        assert all(map(_is_running, pids))
        process.send_signal(end)
    process.wait(timeout=20)
    if end is None:
        assert not Path(directory).exists()
    assert _wait_until(lambda: not any(map(_is_running, pids)))


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "SIGTERM"])
def test_an_interrupted_run_keeps_its_rows_and_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    out, temporary = tmp_path / "out.json", tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["perf/test_attention.py", "--scale=smoke", "-k", "eager or flash_pytorch", "-p", "no:cacheprovider"]
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
    )
    assert _wait_until(out.exists, 60)  # the first row is on disk
    below = _children(process.pid)
    assert below
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and "KeyboardInterrupt" in output
    assert "What does attention cost?" in output  # the table of what was measured
    assert '"implementation": "eager"' in out.read_text()
    assert _wait_until(lambda: not any(map(_is_running, below)))
    assert not list(temporary.glob("shardmark-*"))


def test_under_torchrun_its_ranks_are_the_world(device: str) -> None:
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = ["-m", "pytest", "-q", "correctness/test_collectives.py", "-p", "no:cacheprovider", f"--device={device}"]
    run = subprocess.run(
        [*command, *tests], cwd=ROOT, env=_clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" passed") == 1  # rank 0 runs pytest, the others serve it


def test_temporary_files_are_all_in_the_private_directory(device: str) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    with World(1, device) as world:
        world.run(identity)
        new = {name for name in os.listdir(tempfile.gettempdir()) if name not in before and "shardmark" in name}
        assert new == {world._directory.name}
    assert not world._directory.exists()
