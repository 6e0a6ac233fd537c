"""Where time goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from shardmark.meter.kernels import StepProfile
from shardmark.meter.measure_case import warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.trace import memory_snapshot, profile_step
from shardmark.rows.columns import Entry
from shardmark.rows.observers.kernel_tables import kernel_lines
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Kernels, Row


class Profile(Observer):
    """Where time goes: one more step under the profiler, and what `kernels` makes of the first rank's profile.

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
        """Kernels by phase, and each category's share."""
        for entry in entries:
            yield from kernel_lines(entry)
