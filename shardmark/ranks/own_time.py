"""Time of a process's own: what it has computed and slept, without the time in which it waited for a core.

The Linux scheduler counts both for each thread, in /proc/PID/task/TID/schedstat; where it does not, all time counts.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SLOWEST = 50.0
"""A machine counts as at most so many times slower than an idle one: every deadline ends."""


class Thread(NamedTuple):
    """Seconds of a thread, since it began."""

    process: int
    thread: int
    computed: float
    queued: float
    """Waited for a core."""


def threads_of(process: int) -> Iterator[Thread]:
    """The threads of the process and of all that it has started."""
    tasks: list[Path] = []
    with suppress(OSError):  # it has ended
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
    for task in tasks:
        with suppress(OSError, ValueError):  # that thread has ended
            computed, queued, _ = map(int, (task / "schedstat").read_text().split())
            yield Thread(process, int(task.name), computed / 1e9, queued / 1e9)
            for child in map(int, (task / "children").read_text().split()):
                yield from threads_of(child)


class OwnTime:
    """Seconds of a process and of all that it has started, from now on."""

    def __init__(self, process: int | None = None) -> None:
        self._process = os.getpid() if process is None else process
        self._began = time.monotonic()
        self._before = self._seconds()

    def _seconds(self) -> dict[int, Thread]:
        return {each.thread: each for each in threads_of(self._process)}

    def spent(self) -> float:
        """Seconds without those in which any of the processes waited for a core: it may be the one that the others wait
        for. Computing counts in any case, so that ranks that spin on a single core end."""
        wall = time.monotonic() - self._began
        computed, queued = defaultdict[int, float](float), defaultdict[int, float](float)
        for thread, now in self._seconds().items():
            before = self._before.get(thread, now._replace(computed=0.0, queued=0.0))
            computed[now.process] = max(computed[now.process], now.computed - before.computed)
            queued[now.process] = max(queued[now.process], now.queued - before.queued)
        return max(wall - sum(queued.values()), max(computed.values(), default=0.0), wall / SLOWEST)
