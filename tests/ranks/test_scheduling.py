"""Where ranks run, and when: those that are measured are bound to their cores and preempt nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from correctness.support.paths import ROOT
from shardmark.ranks.process_setup import bind_to_cores
from shardmark.rows.machine import chosen_policy

Found = tuple[list[set[int]], list[set[int]]]


SCRIPT = """
import json
from shardmark.ranks.world import World
from tests.support.ranks import cores_and_policies

with World(2) as world:
    print(json.dumps(world.run(cores_and_policies)))
"""


def two_ranks(workers: int) -> Found:
    """Cores and policies of two ranks, where that many processes of pytest-xdist share the machine."""
    environment = {**os.environ, "PYTEST_XDIST_WORKER_COUNT": str(workers)}
    script = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    cores, policies = zip(*json.loads(ended.stdout), strict=True)
    return [set(each) for each in cores], [set(each) for each in policies]


@pytest.fixture(scope="module")
def alone() -> Found:
    """Where nothing shares the machine, as when times are taken."""
    return two_ranks(workers=1)


def test_ranks_are_bound_to_their_share_of_the_cores(alone: Found) -> None:
    cores, ((first, second), _) = os.sched_getaffinity(0), alone
    if len(cores) == 1:
        pytest.skip("a single core is not shared out")
    assert first.isdisjoint(second) and first | second == cores
    assert len(first) == len(cores) // 2


def allow(policy: int, priority: int = 0) -> None:
    """Have this thread scheduled so; skip where that is not allowed."""
    try:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except OSError as error:
        pytest.skip(f"this machine does not allow this user that scheduling policy: {error.strerror}")


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Any]]:
    """Calls a function in a thread of its own, which ends with its policy."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda function, *args: thread.submit(function, *args).result()


def test_no_thread_of_a_rank_preempts_another_as_it_wakes(alone: Found, in_thread: Callable[..., Any]) -> None:
    in_thread(allow, os.SCHED_BATCH)
    assert alone[1] == [{os.SCHED_BATCH}] * 2


@pytest.mark.parametrize(
    ("policy", "priority", "chosen"),
    [
        ("SCHED_RR", 1, True),
        ("SCHED_FIFO", 1, True),
        ("SCHED_IDLE", 0, True),
        ("SCHED_OTHER", 0, False),
        ("SCHED_BATCH", 0, False),
    ],
)
def test_a_policy_of_the_users_is_that_of_the_ranks_and_an_ordinary_one_is_no_choice(
    policy: str, priority: int, chosen: bool, in_thread: Callable[..., Any]
) -> None:
    """`chrt --rr 1 pytest perf` sets one (docs/budgets.md)."""
    in_thread(allow, number := getattr(os, policy), priority)
    assert in_thread(chosen_policy) == (policy if chosen else "")
    in_thread(bind_to_cores, 0, 1)
    assert in_thread(os.sched_getscheduler, 0) == (number if chosen else os.SCHED_BATCH)


def test_a_policy_that_children_do_not_have_is_no_choice(in_thread: Callable[..., Any]) -> None:
    in_thread(allow, os.SCHED_RR | os.SCHED_RESET_ON_FORK, 1)
    assert in_thread(chosen_policy) == ""


def test_beside_other_workers_they_run_wherever_there_is_room() -> None:
    cores, policies = two_ranks(workers=2)
    assert cores == [os.sched_getaffinity(0)] * 2
    assert policies == [{os.sched_getscheduler(0)}] * 2
