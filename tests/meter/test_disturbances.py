"""Disturbances: each kind is told from the others by the times alone, and noise is none."""

import math
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from shardmark.meter.disturbances import (
    BURSTS,
    DRIFT,
    GLOO_THREADS,
    LEVEL,
    WAITED,
    WARMUP,
    disturbances,
    in_words,
    seconds_waited,
)
from shardmark.ranks.world import World

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


def waited_as_two_threads(name: str) -> float:
    """Seconds that two threads of that name waited for the core that they share for half a second."""
    core, before, meeting = min(os.sched_getaffinity(0)), seconds_waited(), threading.Barrier(3, timeout=30)

    def multiply() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        os.sched_setaffinity(0, {core})
        matrix, until = torch.rand(200, 200), time.perf_counter() + 0.5
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)  # without the interpreter's lock
        meeting.wait()
        meeting.wait()  # stay until the count is read: a thread that has ended is not counted

    threads = [threading.Thread(target=multiply, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    meeting.wait()
    waited = seconds_waited() - before
    meeting.wait()
    for thread in threads:
        thread.join()
    return waited


def names_of_threads() -> set[str]:
    """The kernel's names of this process's threads."""
    return {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count how long a thread waits for a core"
)
def test_waiting_for_a_core_is_seen_of_all_threads_but_gloos() -> None:
    """Gloo's threads also wait for their own rank."""
    with World(2) as world:
        assert [GLOO_THREADS - names for names in world.run(names_of_threads)] == [set(), set()]
    assert waited_as_two_threads("python") > 0.25
    assert waited_as_two_threads("gloo_tcp_loop") < 0.2
