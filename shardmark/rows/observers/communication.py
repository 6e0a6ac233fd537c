"""The communication that a step waits for, and the share that it hides behind its computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import ClassVar, Literal

from shardmark.meter.plan import COMMUNICATION, COMPUTE, Measured
from shardmark.rows.columns import Cell, Column, Entry
from shardmark.rows.fill import part_seconds, step_seconds
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row
from shardmark.text import ms
from shardmark.verdict.betting import PASS, interval, paired_ratios


def _alone(name: Literal["compute_alone", "communication_alone"]) -> Cell:
    return lambda entry, row: ms(row["time"][name]) if name in row["time"] else None


def _hidden(entry: Entry, row: Row) -> str | None:
    return f"{row['time']['hidden']:.0%}" if "hidden" in row["time"] else None


class ExposedCommunication(Observer):
    """Exposed communication: a step's seconds beyond those of its computation alone, timed in the same rounds.

    The workload's `compute_step(mark)` is its step without communication. So a wait counts wherever the implementation
    has it: after backward, or inside forward and backward as PyTorch's DDP and FSDP do. Copies that are made only to
    communicate count as well. A part that `compute_step` does not mark, such as the optimizer, must not communicate.
    """

    needs: ClassVar[tuple[str, ...]] = ("compute_step",)
    timed: ClassVar[Mapping[str, str]] = {COMPUTE: "compute_step"}

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The row's time by part: the parts of computation alone, and the remaining time as "communication"."""
        parts, compute = part_seconds(ranks), part_seconds(ranks, COMPUTE)
        together = sum(parts.get(part, 0.0) for part in {*compute, "communication"})
        row["time"]["parts"] = parts | compute | {"communication": together - sum(compute.values())}


class HiddenCommunication(ExposedCommunication):
    """Also the share of communication that the step hides: the overlap of communication and computation, over
    communication alone. It is 1 if the step takes no longer than its computation alone.

    The workload's `communication_step(mark)` is its communication without the rest. Nothing is hidden where the rounds
    do not show that the step is shorter than computation and communication in turn: fewer messages are no overlap.
    """

    needs = ("compute_step", "communication_step")
    timed: ClassVar[Mapping[str, str]] = {COMPUTE: "compute_step", COMMUNICATION: "communication_step"}
    columns: ClassVar[tuple[Column, ...]] = (
        Column("compute alone", _alone("compute_alone"), after="optimizer"),
        Column("comm. alone", _alone("communication_alone"), after="optimizer"),
        Column("hidden", _hidden, after="optimizer"),
    )

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's time: the medians of "compute_alone" and "communication_alone", and the share "hidden"."""
        super().fill(row, ranks)
        computes, communications = (step_seconds(ranks, name) for name in (COMPUTE, COMMUNICATION))
        steps = step_seconds(ranks)[: len(computes)]  # later rounds are of the race alone
        in_turn = [sum(both) for both in zip(computes, communications, strict=True)]
        overlaps = interval(paired_ratios(steps, in_turn)).verdict(1.0) == PASS
        compute, communication = median(computes), median(communications)
        row["time"] |= {
            "compute_alone": compute,
            "communication_alone": communication,
            "hidden": max(0.0, 1 - max(0.0, median(steps) - compute) / communication) if overlaps else 0.0,
        }
