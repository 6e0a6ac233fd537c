"""A stand-in for an implementation, and a row from given measurements."""

from shardmark.api import Implementation
from shardmark.meter.plan import Identity, Measured
from shardmark.rows.fill import new_row, time_entry
from shardmark.rows.observers import Observer
from shardmark.rows.row import Row


def stand_in(name: str) -> Implementation:
    """An implementation for workloads that only look at its name; it cannot be sent to other ranks."""
    return Implementation("stand-ins", name, target=name)


def row_by(observer: Observer, ranks: list[Measured]) -> Row:
    """A row of implementation "long" of family "naps": the times of these ranks, and the observer's fields."""
    row = new_row(Identity("naps", "long", "a case", "cpu"), "smoke", None)
    row["time"], _ = time_entry(ranks, None)
    observer.fill(row, ranks)
    return row
