"""The times at which each rank does what."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardmark.meter.measure_case import warmed_up
from shardmark.meter.plan import Measured, Plan
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row, Span

Ranks = list[list[Span]]


class Spans(Observer):
    """The times at which each rank does what, in one more step, which all ranks begin together.

    The workload's `watched(look)` does a step and calls `look(kind, label, does)` for all that is to be seen, which
    calls `does()`. If it has `expected()`, that returns (kind, label, begin, end) of every rank, in seconds.
    """

    needs = ("watched",)

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> tuple[list[Span], Ranks]:
        """This rank's spans, and the expected ones of all ranks."""
        workload: Any = warmed_up(plan)
        workload.prepare()
        if plan.world_size > 1:
            dist.barrier()
        spans: list[Span] = []
        start = _now(plan.device)  # the clocks of several hosts have nothing else in common

        def look(kind: str, label: str, does: Callable[[], None]) -> None:
            begin = _now(plan.device) - start
            does()
            spans.append({"kind": kind, "label": label, "begin": begin, "end": _now(plan.device) - start})

        workload.watched(look)
        expected = workload.expected() if hasattr(workload, "expected") else []
        return spans, [
            [{"kind": kind, "label": label, "begin": begin, "end": end} for kind, label, begin, end in rank]
            for rank in expected
        ]

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The row's "spans", from the first beginning on; none where nothing was to be seen."""
        found = [rank.observed[type(self)][0] for rank in ranks]
        if not any(found):
            return
        first = min(span["begin"] for spans in found for span in spans)
        row["spans"] = {"measured": [[_moved(span, -first) for span in spans] for spans in found]}
        if expected := ranks[0].observed[type(self)][1]:
            row["spans"]["expected"] = expected


def _moved(span: Span, seconds: float) -> Span:
    found = span.copy()
    found["begin"] += seconds
    found["end"] += seconds
    return found


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
