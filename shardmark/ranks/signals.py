"""SIGINT, SIGTERM and SIGHUP: each ends the run as Ctrl-C does, but not while rows are written."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of a scheduler, and of a terminal that closes."""
AGAIN = 10.0
"""Seconds after which a signal comes again, until the run notices it: other code may drop an exception, as a compiler
does in its callbacks, and a test that expects errors."""


class Ending:
    """Makes signals raise KeyboardInterrupt; a signal that is held back raises it later."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held = 0
        self._came = False
        self._repeating: object = None
        """A mark of the signal that comes again."""

    def handle(self) -> None:
        """Handle the signals until `leave`. An ignored signal stays ignored: a run under nohup survives its
        terminal."""
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)

    def leave(self) -> None:
        """Put the former handlers back."""
        self.stop_repeating()
        while self._before:
            signal.signal(*self._before.popitem())

    def hold(self) -> None:
        """Hold signals back from now on: the run is ending by itself."""
        self.stop_repeating()
        self._held += 1

    def stop_repeating(self) -> None:
        """The run ends because of a signal, which need not come again."""
        self._repeating = None

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
                self._end(signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            self._end(number)
        self._came = True

    def _end(self, number: int) -> NoReturn:
        self._repeating = mark = object()
        # Not by `threading`, whose locks the interrupted code may hold.
        _thread.start_new_thread(self._send_again, (number, mark))
        raise KeyboardInterrupt

    def _send_again(self, number: int, mark: object) -> None:
        time.sleep(AGAIN)
        main = threading.main_thread().ident
        if self._repeating is mark and main is not None:
            signal.pthread_kill(main, number)
