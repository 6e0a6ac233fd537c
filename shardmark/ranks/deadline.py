"""Deadlines of tests. An implementation that has hung once gets a short deadline in its other tests."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardmark.ranks.patience import Patience

TRIED = 60.0
"""Seconds, by default, for a test of an implementation that `--impl` names."""
MEASURED = 30.0
"""A measured case gets this many deadlines: by default half an hour, as cases at paper scale are long."""
AFTER_THE_FIRST = 3.0
"""Seconds for each further test of an implementation that has hung: it has failed already."""
MOST_HANGS = 3
"""An implementation that has hung in so many claims is asked nothing more."""
BEATS = 10
"""Alarms that make up a deadline."""
OVERDUE = 1e-3
"""Seconds to an alarm that is overdue: zero would disarm it."""


class Hung(BaseException):
    """A test did not end by its deadline; the traceback ends where it was. `except Exception` does not catch it."""


class Deadlines:
    """Deadlines in seconds, by implementation; `measured` is that of a measured case."""

    def __init__(self, first: float, measured: float) -> None:
        self.first = first
        self.measured = measured
        self._hangs: dict[str, set[str]] = {}

    def of(self, name: str) -> float:
        return min(self.first, AFTER_THE_FIRST) if self.has_hung(name) else self.first

    def has_hung(self, name: str) -> bool:
        return name in self._hangs

    def hung_in(self, name: str) -> set[str]:
        """The claims in which it has hung."""
        return self._hangs.get(name, set())

    def note_hang(self, name: str, claim: str) -> None:
        self._hangs.setdefault(name, set()).add(claim)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Hung in a block that takes longer, in seconds of this process's and its ranks' own (`Patience`). C code
    finishes first; off the main thread there is no deadline. A deadline is `BEATS` alarms: a process that was stopped
    hears one of them when it goes on.

    A process has one alarm. An alarm set before, as by pytest-timeout, still rings at its time; where that is sooner,
    it is the deadline.
    """
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < remaining < seconds:
        yield
        return

    patience, asking = Patience(seconds, seconds / BEATS), threading.Lock()

    def expire(number: int, frame: FrameType | None) -> None:
        if not asking.acquire(blocking=False):
            return  # this alarm rings within the answer to the last, which takes longer where the machine is busy
        try:
            if patience.is_over():
                raise Hung(f"had not ended after {seconds:g} s")
        finally:
            asking.release()

    before = signal.signal(signal.SIGALRM, expire)
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds / BEATS, seconds / BEATS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - began), OVERDUE), interval)
