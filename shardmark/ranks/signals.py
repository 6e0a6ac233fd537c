"""SIGINT, SIGTERM and SIGHUP: each ends the run as Ctrl-C does, but not while rows are written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of a scheduler, and of a terminal that closes."""


class Ending:
    """Makes signals raise KeyboardInterrupt; a signal that is held back raises it later."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held = 0
        self._came = False

    def handle(self) -> None:
        """Handle the signals until `leave`. An ignored signal stays ignored: a run under nohup survives its
        terminal."""
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)

    def leave(self) -> None:
        """Put the former handlers back."""
        while self._before:
            signal.signal(*self._before.popitem())

    def hold(self) -> None:
        """Hold signals back from now on: the run is ending by itself."""
        self._held += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back in the block; raise after it."""
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
