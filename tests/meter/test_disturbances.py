"""Disturbances: each kind is told from the others by the times alone, and noise is none."""

import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from shardmark.meter.disturbances import (
    BURSTS,
    DRIFT,
    LEVEL,
    WAITED,
    WARMUP,
    Threads,
    disturbances,
    in_words,
)

ROUNDS = 100


def series(shape: str, seed: int = 0) -> tuple[list[float], list[float]]:
    """Times of a step and of its peer, which takes twice as long, on a machine with that disturbance."""
    generator = random.Random(seed)

    def slowness(i: int) -> float:
        match shape:
            case "warm-up":
                return 1.5 if i < 10 else 1.0
            case "drift":
                return 1 + 0.3 * i / ROUNDS
            case "level":
                return 1.2 if i >= 60 else 1.0
            case "bursts":
                return 2.0 if i % 10 == 3 else 1.0
        return 1.0

    def step(i: int) -> float:
        return slowness(i) * math.exp(generator.gauss(0, 0.03))

    mine = [step(i) for i in range(ROUNDS)]
    return mine, [2 * step(i) for i in range(ROUNDS)]


@pytest.mark.parametrize(
    ("shape", "size"), [(WARMUP, 0.5), (DRIFT, 0.3), (LEVEL, 0.2), (BURSTS, 0.1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("seed", range(3))
def test_each_is_told_from_the_others(shape: str, size: float, seed: int) -> None:
    for peer in (True, False):
        mine, peers = series(shape, seed)
        found = disturbances(mine, peers if peer else [], waited=0.0)
        assert found.keys() == {shape} and found[shape] == pytest.approx(size, rel=0.25)


def test_noise_alone_is_none() -> None:
    found = [disturbances(*series("quiet", seed), waited=0.01) for seed in range(100)]
    assert sum(map(bool, found)) <= 1


def test_few_rounds_say_nothing_but_that_threads_waited() -> None:
    assert disturbances([1.0, 2.0, 1.0], [], waited=0.3) == {WAITED: 0.3}
    assert disturbances([1.0, 2.0, 1.0], [], waited=0.0) == {}


def test_it_is_said_in_words() -> None:
    found = {WAITED: 0.25, BURSTS: 0.1, DRIFT: -0.08}
    assert in_words(found) == (
        "its threads waited 25% of the time for a core, which others had; 10% of the rounds were bursts; a drift of -8%"
    )
    assert in_words({LEVEL: 0.2}) == "all at once +20%, as when the clock rate changes"
    assert "as when a neighbour comes or goes" in in_words({LEVEL: 0.2, WAITED: 0.5})
    assert in_words({}) == ""


def since(*threads: tuple[float, float]) -> Threads:
    """Threads that have run and waited for so many seconds."""
    return Threads({str(i): each for i, each in enumerate(threads)})


def test_a_thread_of_gloo_waits_for_others_beyond_what_its_own_rank_runs() -> None:
    """Shares of the rounds of `naive` on two ranks of two cores: alone, and beside a busy process on one core."""
    before = since((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    alone = since((1.766, 1.025), (1.084, 1.058), (1.037, 1.011))
    beside = since((1.08, 1.03), (1.011, 1.858), (1.01, 1.01))
    assert alone.waited(before, computing=1) == pytest.approx(0.025)
    assert beside.waited(before, computing=1) == pytest.approx(0.858 - 0.09)


def test_threads_that_compute_wait_on_average() -> None:
    two = since((0.5, 0.5), (0.9, 0.1))
    assert two.waited(since(), computing=2) == pytest.approx(0.3)
    assert since().waited(since(), computing=2) == 0.0


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count how long a thread waits for a core"
)
def test_waiting_for_a_core_that_another_process_has_is_seen() -> None:
    """Here and there a thread computes on the same core for half a second."""
    core, ready, go, done = min(os.sched_getaffinity(0)), *(threading.Event() for _ in range(3))

    def compute() -> None:
        os.sched_setaffinity(0, {core})
        ready.set()
        go.wait(30)
        matrix, until = torch.rand(200, 200), time.perf_counter() + 0.5
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)  # without the interpreter's lock
        done.wait(30)  # stay until the count is read: a thread that has ended is not counted

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    assert ready.wait(30)
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None and neighbour.stdout.readline()  # it runs
        before = Threads.now()
        go.set()
        time.sleep(0.6)
        waited = Threads.now().waited(before, computing=1)
    finally:
        neighbour.kill()
        neighbour.communicate()
        done.set()
        thread.join()
    assert waited > 0.1
