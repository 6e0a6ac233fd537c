"""What the rounds of a step take after more and more warm-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from shardmark.meter.plan import Measured
from shardmark.rows.columns import Cell, Column, Entry
from shardmark.rows.observers import Observer
from shardmark.rows.row import Row
from shardmark.text import ms


class AfterWarmups(Observer):
    """Seconds of the rounds that came after each number of warm-ups."""

    def __init__(self, seconds: Mapping[int, Sequence[float]]) -> None:
        self.seconds = seconds

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's time "after_warmups", a mean and a standard deviation by their number."""
        row["time"]["after_warmups"] = {
            str(count): {"mean": fmean(values), "stddev": stdev(values)} for count, values in self.seconds.items()
        }


def after_warmups(count: int) -> Column:
    """What the rounds took after that many, in ms."""
    return Column(f"{count} warm-up{'s' * (count != 1)}", _cell(count, "{mean} ± {stddev}"), _cell(count, "{mean}"))


def _cell(count: int, form: str) -> Cell:
    def cell(entry: Entry, row: Row) -> str | None:
        after = row["time"].get("after_warmups", {}).get(str(count))
        return after and form.format(**{name: ms(seconds) for name, seconds in after.items()})

    return cell
