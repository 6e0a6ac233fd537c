"""The losses of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardmark.meter.plan import Measured
from shardmark.rows.columns import Column, Entry
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row


def _losses(entry: Entry, row: Row) -> str | None:
    return " → ".join(f"{loss:.3f}" for loss in row.get("losses", ())) or None


class Losses(Observer):
    """The loss of each step, as the test found it."""

    columns: ClassVar[tuple[Column, ...]] = (Column("losses", _losses, after="MFU"),)

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses = list(losses)

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The row's "losses"."""
        row["losses"] = self.losses
