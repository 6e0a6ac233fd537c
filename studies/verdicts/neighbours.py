"""Neighbours: processes that disturb a machine in a known way."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def _disturb(does: Callable[[int], None], seed: int) -> None:
    """Run as an ordinary process, even if the starting one runs in real time."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    does(seed)


def _is_needed() -> bool:
    """Whether the starting process is alive: it may have been killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def busy(seed: int) -> None:
    """Busy and idle in turns of a tenth of a second to some seconds, as a build's jobs are."""
    generator = random.Random(seed)
    while _is_needed():
        _spin(min(generator.expovariate(2), 5.0))
        time.sleep(min(generator.expovariate(2), 5.0))


def drift(seed: int) -> None:
    """Busier and busier for half a minute, from idle; then again."""
    began = time.perf_counter()
    while _is_needed():
        share = (time.perf_counter() - began) / 30 % 1
        _spin(0.02 * share)
        time.sleep(0.02 * (1 - share) + 1e-4)


def spikes(seed: int) -> None:
    """Busy some five times a second, for 10 to 100 ms."""
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
"""By name: what each process does, and their number."""


@contextmanager
def neighbours(name: str, seed: int) -> Iterator[None]:
    """Disturb the block."""
    does, count = NEIGHBOURS[name]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_disturb, args=(does, seed + i), daemon=True) for i in range(count)]
    for process in processes:
        process.start()
    try:
        time.sleep(0.5 if count else 0.0)  # they start meanwhile
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
