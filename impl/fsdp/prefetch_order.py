"""The order in which a step uses the units, which says what to prefetch in the next step."""

from __future__ import annotations

from impl.fsdp.units import Unit


class Order:
    """Records the order of one step to predict the next step's; `depth` is the number of units to prefetch.
    ValueError for an invalid depth, which names the option `name`."""

    def __init__(self, name: str, depth: int) -> None:
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(f"{name} is how many units to prefetch, from 0 on, got {depth!r}")
        self.depth = depth
        self._last: list[Unit] = []
        self._now: list[Unit] = []

    def begin(self) -> None:
        """Begin a new step."""
        if self._now:
            self._last, self._now = self._now, []

    def next_after(self, unit: Unit) -> list[Unit]:
        """Record that `unit` is used now; return the `depth` units expected next.

        The list is empty in the first step, and where this step's order differs from the last step's.
        """
        self._now.append(unit)
        i = len(self._now)
        return self._last[i : i + self.depth] if self._last[i - 1 : i] == [unit] else []
