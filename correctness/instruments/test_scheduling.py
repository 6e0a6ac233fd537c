"""Where ranks run, and when: those that are measured are bound to their cores and preempt nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from correctness.support.paths import ROOT

Found = tuple[list[set[int]], list[set[int]]]


def cores_and_policies(workers: int) -> Found:
    """Of two ranks, where that many processes of pytest-xdist share the machine."""
    environment = {**os.environ, "PYTEST_XDIST_WORKER_COUNT": str(workers)}
    script = [sys.executable, "-m", "correctness.support.where_ranks_run"]
    ended = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    cores, policies = zip(*json.loads(ended.stdout), strict=True)
    return [set(each) for each in cores], [set(each) for each in policies]


@pytest.fixture(scope="module")
def alone() -> Found:
    """Where nothing shares the machine, as when times are taken."""
    return cores_and_policies(workers=1)


def test_ranks_are_bound_to_their_share_of_the_cores(alone: Found) -> None:
    cores, ((first, second), _) = os.sched_getaffinity(0), alone
    if len(cores) == 1:
        pytest.skip("a single core is not shared out")
    assert first.isdisjoint(second) and first | second == cores
    assert len(first) == len(cores) // 2


def test_no_thread_of_a_rank_preempts_another_as_it_wakes(alone: Found) -> None:
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)).result()
        except OSError as error:
            pytest.skip(f"this machine allows no other scheduling policy: {error.strerror}")
    assert alone[1] == [{os.SCHED_BATCH}] * 2


def test_beside_other_workers_they_run_wherever_there_is_room() -> None:
    cores, policies = cores_and_policies(workers=2)
    assert cores == [os.sched_getaffinity(0)] * 2
    assert policies == [{os.sched_getscheduler(0)}] * 2
