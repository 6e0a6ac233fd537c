"""What an observer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from shardmark.api.workload import Workload
from shardmark.meter.plan import Measured, RankObserver
from shardmark.rows.columns import Column, Entry
from shardmark.rows.row import Row


class Observer(RankObserver):
    """One thing to see. Its class methods (`RankObserver`) run on the ranks; its other methods run where pytest runs.

    `min_rounds` is how many timed rounds it takes. `columns` show what it fills of the row.
    """

    min_rounds: int = 1
    of_memory: ClassVar[bool] = False
    """Whether it sees memory alone, and so a simulation as well."""
    columns: ClassVar[tuple[Column, ...]] = ()

    def check(self, workload: type[Workload]) -> None:
        """Raises TypeError, in one line, where the workload lacks what this observer needs."""
        __tracebackhide__ = True
        for method in self.needs:
            if not callable(getattr(workload, method, None)):
                raise TypeError(f"{type(self).__name__} needs {workload.__name__}.{method}(), which is not defined")

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """Write the observer's part of the row, when all else but the verdict is there."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Lines under the table of a question, from all of its rows."""
        return iter(())
