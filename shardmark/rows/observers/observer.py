"""Base class of observers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from shardmark.api.workload import Workload
from shardmark.meter.plan import Measured, RankObserver
from shardmark.rows.columns import Column, Entry
from shardmark.rows.row import Row


class Observer(RankObserver):
    """Class methods (`RankObserver`) run on the ranks; the other methods run in pytest's process.

    `min_rounds` is the least number of timed rounds. `columns` show the observer's part of the row.
    """

    min_rounds: int = 1
    of_memory: ClassVar[bool] = False
    """Observes memory alone, so it works in a simulation too."""
    columns: ClassVar[tuple[Column, ...]] = ()
    fields: ClassVar[Mapping[str, Any]] = {}
    """Types of the fields that `fill` adds and `shardmark.rows.row` does not have, by their paths:
    `{"time.nap": Annotated[Seconds, "The nap alone."]}`."""

    def check(self, workload: type[Workload]) -> None:
        """Raise TypeError, in one line, if the workload lacks a method that this observer needs."""
        __tracebackhide__ = True
        for method in self.needs:
            if not callable(getattr(workload, method, None)):
                raise TypeError(f"{type(self).__name__} needs {workload.__name__}.{method}(), which is not defined")

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """Fill the observer's part of the row; all other parts but the verdict are filled already."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Lines under a question's table, from all of its entries."""
        return iter(())
