"""The losses of a run."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.observers.observer import Observer
from shardmark.plan import Measured
from shardmark.rows import Row


class Losses(Observer):
    """The loss of each step, as the test found it."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses = list(losses)

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """The row's "losses"."""
        row["losses"] = self.losses
