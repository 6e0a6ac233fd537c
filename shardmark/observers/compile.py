"""What compiling costs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from statistics import median

from shardmark.cold import cold_compiler, has_compiled
from shardmark.memory import Meter
from shardmark.observers.observer import Observer
from shardmark.plan import Measured, Plan
from shardmark.rows import Row, largest_memory, step_seconds


class Compile(Observer):
    """What compiling costs: the first step, compiled from nothing, and the peaks of the steps before steady state."""

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[None]:
        """Compile from nothing: no cache of an earlier compilation, on disk or in the process, is used."""
        return cold_compiler(plan.device)

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Mark what is live before the first step, which may leave something behind."""
        memory.mark("before_first_step")

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> float | None:
        """Seconds of the first step, where it compiled anything."""
        return measured.first_step if has_compiled() else None

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's "memory" the "peaks"; in its "time" the "first_step", and what it took beyond the median."""
        row["memory"]["peaks"] = largest_memory(ranks).peaks
        first_steps = [seconds for rank in ranks if (seconds := rank.observed[type(self)]) is not None]
        if first_steps:
            row["time"]["first_step"] = max(first_steps)
            row["time"]["compile"] = max(first_steps) - median(step_seconds(ranks))
