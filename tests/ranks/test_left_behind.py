"""State that a call changes on its ranks is restored, or the ranks are replaced; its test is warned."""

import os
import pickle
import queue
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from correctness.support.waiting import wait_until
from shardmark.ranks.channel import send
from shardmark.ranks.failures import RankError
from shardmark.ranks.left_behind import LeftBehind
from shardmark.ranks.rank import Answer
from shardmark.ranks.world import GRACE, World
from tests.faults.rank_faults import FAULTS, state
from tests.faults.table import WARNS, names_of
from tests.support.processes import is_running
from tests.support.ranks import identity, size_of, start_a_sleeper


def state_of(world: World) -> list[Any]:
    torch.manual_seed(1)
    return world.run(state)


@pytest.mark.filterwarnings("ignore:leaves_(no_environment|many_functions|another_precision)")
@pytest.mark.parametrize("name", names_of(WARNS, "leaves_half_a_collective"))
def test_what_a_call_leaves_is_restored_or_ends_its_world_and_its_test_is_warned(name: str, pair: World) -> None:
    if name == "leaves_half_a_collective" and pair.device != "cpu":
        pytest.skip("on NCCL a collective that no other rank begins does not end, and its call hangs")
    if name == "leaves_other_cores" and os.cpu_count() == 1:
        pytest.skip("a single core cannot be given up")
    before, pids, fault = state_of(pair), pair.pids, FAULTS[name]
    with pytest.warns(LeftBehind, match=fault.pattern(2)):
        pair.run(fault.function)
    if fault.says.endswith("restored"):
        assert state_of(pair) == before and pair.pids == pids
    else:
        assert not pair.alive


def test_it_does_so_where_warnings_are_errors_too(pair: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LeftBehind):
            pair.run(FAULTS["leaves_no_group"].function)
    assert not pair.alive


def start_a_daemon_that_waits() -> None:
    threading.Thread(target=queue.Queue().get, daemon=True).start()


def start_a_pool() -> list[int]:
    _pools.append(ThreadPoolExecutor(2))
    return [*_pools[-1].map(abs, range(-4, 0))]


_pools: list[ThreadPoolExecutor] = []


def test_a_call_that_leaves_nothing_warns_of_nothing(pair: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run(state)
        pair.run(identity)
        pair.run(start_a_daemon_that_waits)  # as a wrapper's own thread, between two collectives
        pair.run(start_a_pool)


def test_a_stopped_rank_does_not_hold_what_is_sent_to_it(pair: World) -> None:
    os.kill(pair.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 had not answered after \d+\.\d s"):
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


@pytest.mark.parametrize("options", [{"env": {}}, {"start_new_session": True}], ids=["no environment", "daemon"])
def test_what_a_rank_has_started_ends_with_it(options: dict[str, Any], pair: World) -> None:
    pids = pair.run(start_a_sleeper, options)
    assert all(map(is_running, pids))
    pair.close()
    assert wait_until(lambda: not any(map(is_running, pids)))
