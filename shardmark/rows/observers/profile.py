"""Where time goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardmark.meter.kernels import CATEGORIES, MATRIX_PRODUCT, StepProfile
from shardmark.meter.measure_case import warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.trace import memory_snapshot, profile_step
from shardmark.rows.columns import Entry
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Kernels, Row
from shardmark.text import cut, layout

TOP = 5
"""Most kernels of a phase that are printed; the row has more."""

WIDEST = 60
"""Most characters of a kernel's name; some of CUDA's are templates of several hundred."""


class Profile(Observer):
    """Where time goes: one more step under the profiler; `kernels` makes the row's "kernels" of the first rank's
    profile.

    With --trace-dir it writes each rank's Chrome trace, and on CUDA its memory snapshot.
    """

    def __init__(self, kernels: Callable[[StepProfile], Kernels] | None = None) -> None:
        self.kernels = kernels

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> tuple[StepProfile, list[Path]]:
        """Profile a new workload after everything else was measured, so that no other figure changes."""
        release(plan.device)
        if plan.trace is None:
            return profile_step(warmed_up(plan), plan.device), []
        rank = f".rank{dist.get_rank()}" if plan.world_size > 1 else ""
        chrome, snapshot = (plan.trace.with_name(f"{plan.trace.name}{rank}.{end}") for end in ("json", "pickle"))
        with memory_snapshot(snapshot, plan.device) as snapshots:
            workload = warmed_up(plan)
        return profile_step(workload, plan.device, trace=chrome), [chrome, *snapshots]

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The row's "kernels", and "trace": the names of all ranks' files."""
        observed = [rank.observed[type(self)] for rank in ranks]
        if self.kernels is not None:
            row["kernels"] = self.kernels(observed[0][0])
        if files := [file.name for _, files in observed for file in files]:
            row["trace"] = files

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """For each row with kernels two tables: kernels by phase, and each category's share."""
        for entry in entries:
            row = entry["extra_info"]
            if kernels := row.get("kernels"):
                yield from ("", f"{row['case']['id']}  {row['implementation']}: kernels by phase", "")
                yield from layout(list(_kernels(kernels["phases"])), ("phase", "kernel", "category"))
                yield ""
                yield from layout(list(_categories(kernels["phases"])), ("of",))


def _kernels(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    for phase, entry in phases.items():
        for kernel in entry["top"][:TOP]:
            yield {
                "phase": phase,
                "share": f"{kernel['share']:.1%}",
                "calls": f"{kernel['calls']:,}",
                "total ms": f"{kernel['seconds'] * 1e3:,.3f}",
                "kernel": cut(kernel["name"], WIDEST),
                "category": kernel["category"],
            }


def _categories(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    """Each category's share of each phase, and of the phases so far, as with and without the optimizer."""
    alone = [[phase] for phase in phases]
    for group in [*alone, *list(accumulate(alone))[1:]]:
        total = sum(phases[phase]["seconds"] for phase in group)
        sums = {kind: sum(phases[phase]["categories"][kind] for phase in group) for kind in CATEGORIES}
        yield {
            "of": " + ".join(group),
            "total ms": f"{total * 1e3:,.3f}",
            **{
                f"{kind}s" if kind == MATRIX_PRODUCT else kind: f"{part / total:.1%}" if total else None
                for kind, part in sums.items()
            },
        }
