"""What an observer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from shardmark.memory import Meter
from shardmark.plan import Measured, Plan, Workload
from shardmark.report.columns import Column, Entry
from shardmark.rows import Row


class Observer:
    """One thing to see. Class methods run on the ranks, to which only the class travels; the others where pytest runs.

    `needs` names methods that the workload must have; `timed` those of them that are timed, by name, in the same
    rounds as the step; `min_rounds` is how many of these it takes. `columns` show what it fills of the row.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    timed: ClassVar[Mapping[str, str]] = {}
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

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[Any]:
        """What all of the measuring happens in."""
        return nullcontext()

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Called in the metered pass, when the workload is made and prepared."""

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> Any:
        """The observer's own pass, after the timed rounds; what it returns becomes `measured.observed[cls]`."""

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """Write the observer's part of the row, when all else but the verdict is there."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Lines under the table of a question, from all of its rows."""
        return iter(())
