"""Which units come next: what gathering ahead goes by."""

from __future__ import annotations

from impl.fsdp.units import Unit


class Order:
    """Units in the order of their use: learnt in one step, foretold in the next."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._last: list[Unit] = []
        self._now: list[Unit] = []

    def begin(self) -> None:
        """A new step."""
        if self._now:
            self._last, self._now = self._now, []

    def next_after(self, unit: Unit) -> list[Unit]:
        """The unit is in use; the `depth` that will be next, none where this step is unlike the last."""
        self._now.append(unit)
        i = len(self._now)
        return self._last[i : i + self.depth] if self._last[i - 1 : i] == [unit] else []
