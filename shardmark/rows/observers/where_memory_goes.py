"""Where memory goes: by tensor, by stage, and by sequence length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import ClassVar, cast

import torch.distributed as dist

from shardmark.meter import timeline
from shardmark.meter.measure_case import WARMUPS, warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.trace import module_ranges, modules_of
from shardmark.rows.columns import Column, Entry
from shardmark.rows.observers.fits import peaks_by_length
from shardmark.rows.observers.memory_tables import memory_lines, stage_lines
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Block, Row, Stage
from shardmark.rows.row import Memory as MemoryPart
from shardmark.text import mib


def _after_init(entry: Entry, row: Row) -> str | None:
    memory = row["memory"]
    observed = "kinds" in memory or "peaks" in memory  # which Timeline and Compile fill
    return mib(memory["phases"]["after_init"]) if observed and "after_init" in memory.get("phases", {}) else None


AFTER_INIT = Column("after init MiB", _after_init, after="before backward MiB")
"""Every metered row has that figure; it is shown where a case is seen before its steady-state step."""


class Timeline(Observer):
    """Where memory goes: every byte of one step on the first rank by kind, module and operator.

    `activations`, bytes by module and operator, stand beside what forward keeps for backward. The workload's `kinds()`
    gives its live tensors as "parameters", "gradients" and "optimizer state".
    """

    needs = ("kinds",)
    of_memory = True
    columns: ClassVar[tuple[Column, ...]] = (AFTER_INIT,)

    def __init__(self, activations: Mapping[tuple[str, str], int] | None = None) -> None:
        self.activations = activations or {}

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> timeline.Timeline | None:
        """Record the first rank; the others run the same steps, as these communicate."""
        if plan.world_size == 1 or dist.get_rank() == 0:
            return timeline_pass(plan)
        release(plan.device)
        warmed_up(plan, WARMUPS + 1)
        return None

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's "memory": "kinds" at each phase, the "curve", "activations", and the "largest" blocks."""
        row["memory"] |= timeline_entry(ranks[0].observed[type(self)], self.activations)

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """For each row three tables, in MiB."""
        return memory_lines(entries)


def timeline_pass(plan: Plan) -> timeline.Timeline:
    """What each byte of one step is, and who allocated it."""
    release(plan.device)
    with timeline.timeline(plan.device) as recording:
        workload = warmed_up(plan)
        workload.prepare()
        with module_ranges(modules_of(workload)):
            recording.mark(timeline.BEFORE, workload.kinds())
            workload.step(lambda part: recording.mark(f"after_{part}", workload.kinds()))
    return recording.read()


def timeline_entry(found: timeline.Timeline, expected: Mapping[tuple[str, str], int]) -> MemoryPart:
    """The observer's part of the row; `expected` is the formula's bytes by module and operator."""
    kept = timeline.by_layer_and_operator(found.activations)
    return {
        "kinds": found.phases,
        "curve": found.curve,
        "activations": [
            {"module": module, "operator": operator, "bytes": kept.get(where, 0), "formula": expected.get(where)}
            for where in {**kept, **expected}
            for module, operator in [where]
        ],
        "largest": [cast(Block, asdict(block)) for block in found.largest],
    }


class Stages(Observer):
    """What is held after each stage of making the workload, as it reports them (`shardmark.api.stage`).

    `formulas` are the bytes that should be live after each.
    """

    of_memory = True

    def __init__(self, formulas: Mapping[str, int]) -> None:
        self.formulas = formulas

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's "memory": "stages", each on the rank that holds most then."""
        if not ranks[0].memory.stages:
            raise TypeError(f"Stages: {row['implementation']} was made without a call of shardmark.api.stage")
        row["memory"]["stages"] = {
            name: cast(Stage, asdict(max((rank.memory.stages[name] for rank in ranks), key=lambda stage: stage.live)))
            | {"formula": self.formulas.get(name)}
            for name in ranks[0].memory.stages
        }

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """One table with a column for each stage."""
        return stage_lines(entries)


class PeakByLength(Observer):
    """How the peak grows with the sequence, of cases that have a `seq`: a fit under the table, nothing in the row."""

    of_memory = True

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """One for each implementation and kind of case that was metered at enough lengths."""
        return peaks_by_length(entries)
