"""Neighbours: processes that disturb a machine in a known way."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def _disturb(does: Callable[[int], None], seed: int) -> None:
    """As a process that has nothing to do with the one that started this."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    does(seed)


def _is_needed() -> bool:
    """Whether the process that started this one is still there, which may be killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def busy(seed: int) -> None:
    """On and off, each for a tenth of a second to some seconds, as jobs of a build do."""
    generator = random.Random(seed)
    while _is_needed():
        _spin(min(generator.expovariate(2), 5.0))
        time.sleep(min(generator.expovariate(2), 5.0))


def drift(seed: int) -> None:
    """Idle at first, and busier and busier for half a minute; then again."""
    began = time.perf_counter()
    while _is_needed():
        share = (time.perf_counter() - began) / 30 % 1
        _spin(0.02 * share)
        time.sleep(0.02 * (1 - share) + 1e-4)


def spikes(seed: int) -> None:
    """Some five times a second, for 10 to 100 ms."""
    generator = random.Random(seed)
    while _is_needed():
        time.sleep(generator.expovariate(5))
        _spin(generator.uniform(0.01, 0.1))


NEIGHBOURS: dict[str, tuple[Callable[[int], None], int]] = {
    "none": (busy, 0),
    "busy": (busy, 1),
    "drift": (drift, 1),
    "spikes": (spikes, 2),
}
"""By name: what they do, and how many of them there are."""


@contextmanager
def neighbours(name: str, seed: int) -> Iterator[None]:
    """They disturb what the block does."""
    does, count = NEIGHBOURS[name]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_disturb, args=(does, seed + i), daemon=True) for i in range(count)]
    for process in processes:
        process.start()
    try:
        time.sleep(0.5 if count else 0.0)  # until they have started
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
