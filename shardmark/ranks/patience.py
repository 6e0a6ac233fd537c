"""A deadline in seconds of this process's own time.

A process that was stopped (Ctrl-Z, a laptop's lid, a debugger) finds the answers of its ranks when it goes on: the time
in between is not counted against them.
"""

from __future__ import annotations

import time

SLICE = 0.25
"""Most seconds to wait at once. A wait that takes several times as long was no wait: the process was stopped."""
MOST = 4
"""A wait of so many slices counts as one."""


class Patience:
    """`seconds` to wait, from now on."""

    def __init__(self, seconds: float) -> None:
        self.waited = 0.0
        """Seconds waited so far."""
        self.left = seconds
        self._last = time.monotonic()

    def shorten(self, seconds: float) -> None:
        """Wait that long at most from now on."""
        self.left = min(self.left, seconds)

    def spend(self, seconds: float) -> None:
        """Count time that this process was at work itself."""
        self.waited += seconds
        self.left -= seconds
        self._last = time.monotonic()

    @property
    def slice(self) -> float:
        """Seconds to wait before the next `is_over`."""
        return max(0.0, min(self.left, SLICE))

    def is_over(self) -> bool:
        """Whether no time is left; to be asked after each wait."""
        passed = time.monotonic() - self._last
        self.spend(passed if passed < MOST * SLICE else SLICE)
        return self.left <= 0
