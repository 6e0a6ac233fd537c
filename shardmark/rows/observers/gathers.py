"""Whether all-gathers end before they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import ClassVar

import torch.distributed as dist

from shardmark.meter import gathers
from shardmark.meter.measure_case import warmed_up
from shardmark.meter.plan import Measured, Plan
from shardmark.rows.columns import Column, Entry
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Gather, Row
from shardmark.text import layout, mib, ms

STEPS = 5


def _in_time(entry: Entry, row: Row) -> str | None:
    if (found := row["time"].get("gathers")) is None:
        return None
    return f"{sum(each['in_time'] > 0.5 for each in found)} of {len(found)}"


def _exposed(entry: Entry, row: Row) -> str | None:
    if (found := row["time"].get("gathers")) is None:
        return None
    return ms(sum(each["exposed"] for each in found))


class Gathers(Observer):
    """Each all-gather of a step: how long before it is wanted it starts, and how long the rank waits for it.

    Medians of some steps, on the rank that waits longest. On CPU ranks; a simulation has its own.
    """

    columns: ClassVar[tuple[Column, ...]] = (
        Column("gathers in time", _in_time, after="optimizer"),
        Column("waits ms", _exposed, after="optimizer"),
    )

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> list[Gather] | str:
        """This rank's all-gathers; in one line why they are not seen."""
        workload, steps = warmed_up(plan), []
        for _ in range(STEPS):
            workload.prepare()
            if plan.world_size > 1:
                dist.barrier()
            try:
                steps.append(gathers.gathers_of(workload.step))
            except RuntimeError as error:
                return str(error)
        if plan.device != "cpu" or len({len(step) for step in steps}) > 1:
            return "not on CPU ranks, or not as many in each step"
        return [
            {
                "part": each[0].part,
                "nbytes": each[0].nbytes,
                "ahead": median(gather.wanted - gather.started for gather in each),
                "exposed": median(gather.over - gather.wanted for gather in each),
                "in_time": fmean(gather.in_time for gather in each),
            }
            for each in zip(*steps, strict=True)
        ]

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The "gathers" of the row's time; none where they are not seen."""
        found = [seen for rank in ranks if isinstance(seen := rank.observed[type(self)], list)]
        if len(found) == len(ranks):
            row["time"]["gathers"] = max(found, key=lambda rank: sum(each["exposed"] for each in rank))

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """For each row, its all-gathers one by one."""
        for entry in entries:
            row = entry["extra_info"]
            if found := row["time"].get("gathers"):
                yield from ("", f"{row['case']['id']}  {row['implementation']}: each all-gather", "")
                yield from layout([_line(number, each) for number, each in enumerate(found, 1)], ("wanted in",))


def _line(number: int, each: Gather) -> dict[str, str | None]:
    return {
        "wanted in": f"{each['part']} {number}",
        "MiB": mib(each["nbytes"]),
        "starts ahead ms": ms(each["ahead"]),
        "waits ms": ms(each["exposed"]),
        "in time": f"{each['in_time']:.0%}",
    }
