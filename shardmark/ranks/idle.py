"""Ranks that are at work between two calls, when they should be idle.

A child or a thread that a call has left spinning slows every later test, and no comparison of settings finds it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardmark.ranks.own_time import threads_of

SHORTEST = 0.02
"""Seconds between two calls from which on they are compared: a thread pool may spin for some milliseconds."""
STARTED = 1.0
"""Seconds in which a program that a rank has started may be at work, and then waits."""
BUSY = 0.5
"""Share of the time from which on a rank counts as busy."""
LIBRARIES = b"compile_worker"
"""In the command line of processes that PyTorch's compiler starts ahead of its work."""


class Idle:
    """The ranks of these process ids, from the end of a call on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.begin()

    def begin(self) -> None:
        """They have nothing to do from now on."""
        self._since = time.monotonic()
        self._before = [_seconds_at_work(pid) for pid in self._pids]

    def busy(self) -> list[int]:
        """Ranks that have been at work all the same, or whose children have, and do not cease within a second: a
        program needs its time to start."""
        ranks = self._at_work()
        end = time.monotonic() + STARTED
        while ranks and time.monotonic() < end:
            self.begin()
            time.sleep(STARTED / 10)
            ranks = self._at_work()
        return ranks

    def _at_work(self) -> list[int]:
        seconds = time.monotonic() - self._since
        if seconds < SHORTEST:
            return []
        both = zip(self._before, map(_seconds_at_work, self._pids), strict=True)
        return [rank for rank, (before, now) in enumerate(both) if now - before > BUSY * seconds]


def _seconds_at_work(pid: int) -> float:
    """Seconds in which the process, and all that it has started, has computed or waited for a core: on a busy machine
    as on an idle one. 0 where the system does not tell."""
    found = 0.0
    ahead: dict[int, bool] = {}
    for thread in threads_of(pid):
        if thread.process not in ahead:
            ahead[thread.process] = _compiles_ahead(thread.process)
        found += 0.0 if ahead[thread.process] else thread.computed + thread.queued
    return found


def _compiles_ahead(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return LIBRARIES in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True
