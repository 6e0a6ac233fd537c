"""How long a test waits for an implementation that hangs: once the whole deadline, from then on little."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TRIED = 60.0
"""Seconds, by default, for what `--impl` names: its user waits for a verdict."""
AFTER_THE_FIRST = 3.0
"""Seconds for an implementation that has hung before: it has failed already, and its other tests are still told."""


class Hung(Exception):
    """A test that had not ended by its deadline; the traceback ends where it was."""


class Deadlines:
    """Seconds for each implementation, by a name that no other has."""

    def __init__(self, first: float) -> None:
        self.first = first
        self._hung: set[str] = set()

    def of(self, name: str) -> float:
        return min(self.first, AFTER_THE_FIRST) if name in self._hung else self.first

    def has_hung(self, name: str) -> None:
        self._hung.add(name)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Hung in what has not ended by then. Code in C is let finish; off the main thread there is no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise Hung(f"had not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
