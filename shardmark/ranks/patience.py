"""A deadline in seconds of the processes' own time: a busy machine does not bring it nearer.

A process that was stopped (Ctrl-Z, a laptop's lid, a debugger) finds the answers of its ranks when it goes on: the time
in between is not counted against them.
"""

from __future__ import annotations

import time

from shardmark.ranks.own_time import OwnTime

SLICE = 0.25
"""Most seconds to wait at once. A wait that takes several times as long was no wait: the process was stopped."""
MOST = 4
"""A wait of so many slices counts as one."""
SHORTEST = 0.01
"""Seconds that are not worth waiting for: an idle machine's threads wait for a core for so long, too."""


class Patience:
    """`seconds` to wait, from now on, in slices of `longest`. Time in which this process, `process` or any that it has
    started waited for a core is given back when nothing is left."""

    def __init__(self, seconds: float, longest: float = SLICE, process: int | None = None) -> None:
        self.waited = 0.0
        """Seconds waited so far."""
        self.left = seconds
        self._longest = longest
        self._process = process
        self._last = time.monotonic()
        self._own: tuple[OwnTime, float] | None = None
        """From the first slice on, as most waits are shorter; and `waited` by then."""

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
        return max(0.0, min(self.left, self._longest))

    def is_over(self) -> bool:
        """Whether no time is left; to be asked after each wait."""
        passed = time.monotonic() - self._last
        self.spend(passed if passed < MOST * self._longest else self._longest)
        if self._own is None and self.waited >= self._longest:
            self._own = OwnTime(self._process), self.waited
        if self.left <= SHORTEST and self._own is not None:
            own, since = self._own
            self.left += max(0.0, self.waited - since - own.spent())
            self._own = OwnTime(self._process), self.waited
        return self.left <= SHORTEST
