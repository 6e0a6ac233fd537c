"""SIGINT, SIGTERM and SIGHUP: each ends the run as Ctrl-C does, but not while rows are written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run from outside: Ctrl-C, a scheduler, or a terminal that goes away."""


class Ending:
    """While it handles them, raises KeyboardInterrupt; where they are held back, after that."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held = 0
        self._came = False

    def handle(self) -> None:
        """Until `leave`. What is ignored stays so: a run under nohup goes on when its terminal ends."""
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)

    def leave(self) -> None:
        """The signals do what they did before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def hold(self) -> None:
        """From now on the run ends by itself."""
        self._held += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes in the block is raised after it."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._came and not self._held:
                self._came = False
                raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._came = True
