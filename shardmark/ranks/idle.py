"""CPU time that ranks use between two calls, when they should use none: a child or a thread that a call left spinning
would slow every later test, and no comparison of settings finds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SHORTEST = 0.02
"""Seconds between two calls from which on CPU time is compared: a thread pool may spin for some milliseconds."""
BUSY = 0.5
"""Share of a core from which on a rank counts as busy."""
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
        self._used = [_cpu_seconds(pid) for pid in self._pids]

    def busy(self) -> list[int]:
        """Ranks that have been at work all the same, or what they started has."""
        seconds = time.monotonic() - self._since
        if seconds < SHORTEST:
            return []
        used = zip(self._used, map(_cpu_seconds, self._pids), strict=True)
        return [rank for rank, (before, now) in enumerate(used) if now - before > BUSY * seconds]


def _cpu_seconds(pid: int) -> float:
    """CPU time of the process and of all that it has started, as far as they still run."""
    found = 0.0
    with suppress(OSError):  # it has ended
        if LIBRARIES not in Path(f"/proc/{pid}/cmdline").read_bytes():
            found = time.clock_gettime(~pid << 3 | 2)  # the clock of another process: clock_getcpuclockid(3)
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += sum(map(_cpu_seconds, map(int, (task / "children").read_text().split())))
    return found
