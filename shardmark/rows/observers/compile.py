"""The cost of compiling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import ClassVar, Literal

from shardmark.meter.memory import Meter
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.recompile import cold_compiler, has_compiled
from shardmark.rows.columns import Cell, Column, Entry
from shardmark.rows.fill import largest_memory, step_seconds
from shardmark.rows.observers.observer import Observer
from shardmark.rows.observers.where_memory_goes import AFTER_INIT
from shardmark.rows.row import Row
from shardmark.text import mib


def _compile(entry: Entry, row: Row) -> str | None:
    return f"{row['time']['compile']:.1f}" if "compile" in row["time"] else None


def _bytes(section: Literal["phases", "peaks"], name: str) -> Cell:
    def cell(entry: Entry, row: Row) -> str | None:
        return mib(nbytes) if (nbytes := row["memory"].get(section, {}).get(name)) is not None else None

    return cell


class Compile(Observer):
    """The cost of compiling: the first step, compiled from nothing, and the peaks of the steps before steady state."""

    columns: ClassVar[tuple[Column, ...]] = (
        Column("compile s", _compile, after="MFU"),
        AFTER_INIT,
        Column("before first step MiB", _bytes("phases", "before_first_step"), after="before backward MiB"),
        Column("first peak MiB", _bytes("peaks", "first"), after="before backward MiB"),
        Column("second peak MiB", _bytes("peaks", "second"), after="before backward MiB"),
    )

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[None]:
        """Compile from nothing: no cache of an earlier compilation, on disk or in the process, is used."""
        return cold_compiler(plan.device)

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Mark the bytes that are live before the first step, which may leave some behind."""
        memory.mark("before_first_step")

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> float | None:
        """Seconds of the first step, where it compiled anything."""
        return measured.first_step if has_compiled() else None

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """Fill "peaks" of the row's "memory", and of its "time" the "first_step" and "compile", its seconds beyond the
        median."""
        row["memory"]["peaks"] = largest_memory(ranks).peaks
        first_steps = [seconds for rank in ranks if (seconds := rank.observed[type(self)]) is not None]
        if first_steps:
            row["time"]["first_step"] = max(first_steps)
            row["time"]["compile"] = max(first_steps) - median(step_seconds(ranks))
