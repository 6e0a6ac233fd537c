"""Interrupt a run at any single step of writing a file: by a signal or an error."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

CALLS = ("pwrite", "ftruncate", "link", "replace", "unlink")
"""Calls that change the disk."""

Act = Callable[[], object]


class Steps:
    """Count the steps of those calls: one each, two of pwrite (before it, and halfway). Call `act` at step `at`."""

    def __init__(self, at: int = -1, act: Act = lambda: None) -> None:
        self.count = 0
        self._at = at
        self._act = act

    def _step(self) -> None:
        self.count += 1
        if self.count - 1 == self._at:
            self._act()

    @contextmanager
    def watched(self) -> Iterator[Steps]:
        """While the block runs."""
        patches = [patch.object(os, name, self._watched(name, getattr(os, name))) for name in CALLS]
        for each in patches:
            each.start()
        try:
            yield self
        finally:
            for each in patches:
                each.stop()

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._step()
            if name == "pwrite":
                descriptor, data, position = args
                half = len(data) // 2
                call(descriptor, bytes(data[:half]), position)
                self._step()
                return half + call(descriptor, bytes(data[half:]), position + half)
            return call(*args, **kwargs)

        return watched


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class SignalAt:
    """For a run of its own: that signal, to itself, at that step of writing rows."""

    number: signal.Signals
    step: int

    def __call__(self) -> None:
        _until_the_end.enter_context(Steps(self.step, lambda: os.kill(os.getpid(), self.number)).watched())


_until_the_end = ExitStack()


@dataclass(frozen=True)
class SignalIn:
    """For a run of its own: those signals, to itself, before a function of Shardmark does its work, or after it."""

    name: str
    """Such as "rows.writer:RowFile.add"."""
    numbers: tuple[signal.Signals, ...]
    after: bool = False
    call: int = 1
    """Which one of its calls."""

    def __call__(self) -> None:
        module, _, path = self.name.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = importlib.import_module(f"shardmark.{module}")
        for name in owners:
            owner = getattr(owner, name)
        original, calls = getattr(owner, attribute), itertools.count(1)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            now = next(calls) == self.call
            if now and not self.after:
                self._send()
            try:
                return original(*args, **kwargs)
            finally:
                if now and self.after:
                    self._send()

        setattr(owner, attribute, interrupted)

    def _send(self) -> None:
        for number in self.numbers:
            os.kill(os.getpid(), number)
