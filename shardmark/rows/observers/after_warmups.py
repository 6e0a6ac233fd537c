"""How long rounds of a step take, by the number of warm-up steps before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from shardmark.meter.plan import Measured
from shardmark.rows.columns import Cell, Column, Entry
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row
from shardmark.text import ms


class AfterWarmups(Observer):
    """Seconds of the rounds after each number of warm-ups."""

    def __init__(self, seconds: Mapping[int, Sequence[float]]) -> None:
        self.seconds = seconds

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The "after_warmups" of the row's time: mean and standard deviation by number of warm-ups."""
        row["time"]["after_warmups"] = {
            str(count): {"mean": fmean(values), "stddev": stdev(values)} for count, values in self.seconds.items()
        }


def after_warmups(count: int) -> Column:
    """Column of the mean and standard deviation after `count` warm-ups, in ms."""
    return Column(f"{count} warm-up{'s' * (count != 1)}", _cell(count, "{mean} ± {stddev}"), _cell(count, "{mean}"))


def _cell(count: int, form: str) -> Cell:
    def cell(entry: Entry, row: Row) -> str | None:
        after = row["time"].get("after_warmups", {}).get(str(count))
        return after and form.format(mean=ms(after["mean"]), stddev=ms(after["stddev"]))

    return cell
