"""What a call changes on its ranks is restored, or the ranks are replaced; its test is warned."""

import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from correctness.support.waiting import wait_until
from shardmark.ranks.channel import send
from shardmark.ranks.failures import RankError
from shardmark.ranks.left_behind import LeftBehind
from shardmark.ranks.rank import Answer
from shardmark.ranks.world import GRACE, World
from tests.support.processes import is_running
from tests.support.ranks import identity


def default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def default_device() -> None:
    torch.set_default_device("meta")


def threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def grad_mode() -> None:
    torch.set_grad_enabled(False)


def determinism() -> None:
    torch.use_deterministic_algorithms(True)


def working_directory() -> None:
    os.chdir("/")


def environment() -> None:
    os.environ["RUN_NAME"] = "mine"


def patched_function() -> None:
    torch.nn.functional.relu = torch.sigmoid


def patched_collective() -> None:
    dist.all_reduce = print  # type: ignore[assignment]


def cuda_autocast() -> None:
    torch.set_autocast_enabled("cuda", True)


LEAKS: dict[Callable[[], None], str] = {
    default_dtype: "torch's default dtype",
    default_device: "torch's default device",
    threads: "the number of threads",
    grad_mode: "grad mode",
    determinism: "deterministic algorithms",
    cuda_autocast: "autocast on cuda",
    working_directory: "the working directory",
    environment: "the environment's RUN_NAME",
    patched_function: "torch.nn.functional.relu",
    patched_collective: "torch.distributed.all_reduce",
}


def state() -> list[Any]:
    """The state that the next test would find."""
    return [
        torch.ones(()).dtype,
        torch.ones(()).device,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        os.getcwd(),
        os.environ.get("RUN_NAME"),
        torch.nn.functional.relu.__name__,
        dist.all_reduce.__name__,
    ]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_what_a_call_changes_in_python_is_restored_and_its_test_is_warned(
    leak: Callable[[], None], pair: World
) -> None:
    before, pids = pair.run(state), pair.pids
    with pytest.warns(LeftBehind, match=rf"{leak.__name__} left on rank 0, 1: {LEAKS[leak]} changed; restored"):
        pair.run(leak)
    assert pair.run(state) == before and pair.pids == pids


def destroy_the_group() -> None:
    dist.destroy_process_group()


def begin_on_rank_1() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        (destroy_the_group, "another process group, or none"),
        pytest.param(begin_on_rank_1, "collectives that not every rank began", marks=pytest.mark.sweep),
    ],
)
def test_what_is_not_restored_ends_the_world(leak: Callable[[], None], what: str, pair: World) -> None:
    if leak is begin_on_rank_1 and pair.device != "cpu":
        pytest.skip("on NCCL a collective that no other rank begins does not end, and its call hangs")
    with pytest.warns(LeftBehind, match=f"{leak.__name__} left on rank 0, 1: {what}"):
        pair.run(leak)
    assert not pair.alive


def umask() -> None:
    os.umask(0o777)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def cores() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)} if len(allowed) > 1 else set(range(os.cpu_count() or 1)))


def policy() -> None:
    other = os.SCHED_OTHER if os.sched_getscheduler(0) == os.SCHED_BATCH else os.SCHED_BATCH
    os.sched_setscheduler(0, other, os.sched_param(0))


def priority() -> None:
    os.nice(1)


def timer() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)


def handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def mask() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open("/proc/self/status", os.O_RDONLY), 0)


SYSTEM = {
    umask: r"the mode of new files \(umask\)",
    limit: "a resource limit",
    cores: "the cores it may run on",
    policy: "its scheduling policy",
    priority: "its priority",
    timer: "a timer",
    handler: "a signal handler",
    mask: "the mask of blocked signals",
    output: "the file behind its standard input, output or error",
}


@pytest.mark.parametrize("leak", SYSTEM, ids=lambda leak: leak.__name__)
def test_ranks_that_change_what_only_the_operating_system_holds_are_replaced(
    leak: Callable[[], None], pair: World
) -> None:
    if leak is cores and os.cpu_count() == 1:
        pytest.skip("a single core cannot be given up")
    with pytest.warns(
        LeftBehind, match=f"{leak.__name__} left on rank 0, 1: {SYSTEM[leak]} changed; the next call gets"
    ):
        pair.run(leak)
    assert not pair.alive


def test_it_does_so_where_warnings_are_errors_too(pair: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LeftBehind):
            pair.run(destroy_the_group)
    assert not pair.alive


def start_a_daemon_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def test_a_call_that_leaves_nothing_warns_of_nothing(pair: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run(state)
        pair.run(identity)
        pair.run(start_a_daemon_thread)  # as a wrapper's own thread, which waits for collectives


def size_of(data: bytes) -> int:
    return len(data)


def test_a_stopped_rank_does_not_hold_what_is_sent_to_it(pair: World) -> None:
    os.kill(pair.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 had not answered after 1\.\d s"):
        pair.run(size_of, bytes(2**23), deadline=1)
    assert time.monotonic() - begin < 1 + 3 * GRACE


def much(nbytes: int) -> bytes:
    return bytes(nbytes)


def test_large_calls_and_answers_arrive_whole(pair: World) -> None:
    assert pair.run(size_of, bytes(2**25)) == [2**25] * 2
    assert pair.run(much, 2**25) == [bytes(2**25)] * 2


def answer_another_call_first() -> str:
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            if end.family == socket.AF_UNIX:
                send(end, 0, pickle.dumps(Answer("of another call")))
    return "of this call"


def test_an_answer_of_another_call_is_not_taken_for_this_ones(pair: World) -> None:
    assert pair.run(answer_another_call_first) == ["of this call"] * 2


def die_with_a_child_that_holds_all_it_had() -> None:
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_death_is_seen_at_once_though_a_child_lives_on_and_before_its_victims(pair: World) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pair.run(die_with_a_child_that_holds_all_it_had, deadline=30)
    assert time.monotonic() - begin < 5 * GRACE
    assert str(caught.value).startswith("rank 1 of 2 was killed by SIGKILL") and caught.value.rank == 1


def start_a_sleeper(options: dict[str, Any] | None = None) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **(options or {})).pid


@pytest.mark.parametrize("options", [{"env": {}}, {"start_new_session": True}], ids=["no environment", "daemon"])
def test_what_a_rank_has_started_ends_with_it(options: dict[str, Any], pair: World) -> None:
    pids = pair.run(start_a_sleeper, options)
    assert all(map(is_running, pids))
    pair.close()
    assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.sweep
def test_a_world_whose_parent_is_killed_leaves_nothing(tmp_path: Any) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import time\n"
        "from tests.ranks.test_left_behind import start_a_sleeper\n"
        "from shardmark.ranks.world import World\n"
        "if __name__ == '__main__':\n"
        "    world = World(2)\n"
        "    print(*world.run(start_a_sleeper), *world.pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=_importing())
    assert run.stdout is not None
    pids = [int(pid) for pid in re.findall(r"\d+", run.stdout.readline())]
    assert len(pids) == 4
    run.kill()
    run.wait()
    assert wait_until(lambda: not any(map(is_running, pids)))


def _importing() -> dict[str, str]:
    from correctness.support.paths import ROOT

    return {**os.environ, "PYTHONPATH": str(ROOT)}
