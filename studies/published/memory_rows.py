"""Published memory beside what is predicted for the same programs, row by row.

    python -m studies.published     # writes docs/published-memory.md

Nothing is fitted: a program is that of its write-up, or follows from its figures, as the docstrings say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from perf.published import UNITS, rows_of
from shardmark.meter.hardware import hardware
from shardmark.meter.recording import recording
from shardmark.predict.simulation.caching_allocator import AtMark, held_at_marks
from shardmark.predict.simulation.communicator import room
from shardmark.predict.simulation.predict import simulation
from studies.published import programs as run
from studies.published.programs import Program
from studies.published.rules import Row, Rules, Unknown, by_rule, why_unknown

ALLOCATED, PEAK, RESERVED = "allocated", "peak_allocated", "peak_reserved"


@dataclass(frozen=True)
class Reading:
    """How a published row is predicted: the program, where it runs, the mark, and the figure at the mark."""

    program: Program
    on: str
    ranks: int
    mark: str
    figure: str
    records_streams: bool = False
    """Whether c10d called `record_stream` at that time."""


@dataclass(frozen=True)
class Compared:
    """A published figure and the predicted one, in bytes; and the most that the allocator takes from the device."""

    row: Row
    on: str
    published: float
    predicted: float
    at_most: float

    @property
    def of_segments(self) -> bool:
        """Whether it is reserved memory, which depends on the order of releases and on how far the host is ahead."""
        return self.row["metric"] == "memory reserved"

    @property
    def error(self) -> float:
        """Error relative to the published figure; below zero it is under-predicted."""
        return self.predicted / self.published - 1


def _attention_a100(row: Row) -> Reading:
    """PyTorch's softmax saves one matrix of scores. Gradients add up: three of them are live at the peak."""
    mark, figure = ("done", PEAK) if row["metric"] == "peak memory" else (row["metric"], ALLOCATED)
    return Reading(_attention(row["case"], run.fused_softmax), "a100-80gb", 1, mark, figure)


def _attention_h100(row: Row) -> Reading:
    """Softmax is written in parts: by the bytes, two matrices are saved, the sums, and the indices of the maxima."""
    program = _attention(row["case"], run.softmax_by_parts)
    return Reading(program, "h100-80gb", 1, "memory before backward", ALLOCATED)


def _attention(case: str, softmax: run.Softmax) -> Program:
    width, length = (int(number) for number in re.findall(r"\d+", case))
    return run.attention(width, length, softmax, first=(width, length) == (16, 256))


TRANSFORMERS = {"2.7B peak memory": ("h100-80gb", 1), "2.7B peak memory, batch 4": ("a100-80gb", 2)}
"""By experiment: the GPU, and which training step is meant. From the second on, AdamW's moments are live in forward."""


def _transformer(row: Row) -> Reading:
    """The course's model, and its own AdamW."""
    on, steps = TRANSFORMERS[row["experiment"]]
    until, length = row["case"].split(", seq ")
    steps = steps if until == "training step" else 1
    program = run.transformer("2.7b", int(length), run.softmax_by_parts, until, steps=steps)
    return Reading(program, on, 1, "done", PEAK)


def _linears(row: Row) -> Reading:
    """On a V100: the 80 MiB in which a bias's gradient is summed up need its 80 multiprocessors. In October 2024
    PyTorch's c10d called `record_stream`.
    """
    strategy, mark = row["case"].split(", ")
    figure = {"memory allocated": ALLOCATED, "peak memory": PEAK, "memory reserved": RESERVED}[row["metric"]]
    return Reading(run.nine_linears(getattr(run, strategy)), "v100-32gb", 8, mark, figure, records_streams=True)


def _ladder(row: Row) -> Reading | None:
    """The memory "after" a stage is the peak so far. In eager mode gathered parameters stay until backward."""
    if row["case"] in ("eager fp32", "autocast bf16"):
        mark = "after model" if row["metric"] == "memory after init" else "done"
        return Reading(run.mlp_ladder(autocast=row["case"] == "autocast bf16"), "a100-80gb", 1, mark, PEAK)
    marks = {"memory after init": "after model", "memory before step 0": "after data_parallel", "peak memory": "done"}
    meta = row["case"] == "meta init"
    mark = marks.get(row["metric"], row["metric"].removeprefix("memory "))
    if row["case"] != "data_parallel" and not ("meta init" in row["case"] and mark != "done"):
        return None
    return Reading(run.mlp_ladder(sharded=True, meta=meta), "a100-80gb", 4, mark, PEAK)


RULES: dict[str, Rules[Reading]] = {
    "cs336_a100": (("attention", _attention_a100), ("2.7B", _transformer)),
    "cs336_stanford336": (("attention", _attention_h100), ("2.7B", _transformer)),
    "odsc_fsdp": (("MLP", _linears),),
    "simple_pytorch": (("MLP|meta init", _ladder),),
}


@cache
def held(program: Program, on: str, ranks: int, records_streams: bool = False) -> dict[str, tuple[AtMark, AtMark]]:
    """The allocator's bytes at each mark of the program: with streams as expected, and as slow as possible."""
    device = hardware(on)
    with simulation(ranks, on=device, records_streams=records_streams), recording("cpu") as recorded:
        program()
    events, limit = recorded.replay(), room(device, ranks)
    expected, slowest = (held_at_marks(events, limit=limit, slowest=slowest) for slowest in (False, True))
    return {mark: (expected[mark], slowest[mark]) for mark in expected}


def rows(file: str) -> Iterator[Row]:
    """The file's rows of memory, of programs that are not compiled."""
    for row in rows_of(file):
        eager = "compile" not in row["experiment"].replace("uncompiled", "") + row["case"]
        if row["unit"] in ("MiB", "GiB", "GB") and float(row["value"]) > 0 and eager:
            yield row


def compared(file: str) -> list[Compared]:
    """The file's rows of known programs, beside their predictions."""
    predictable = (row for row in rows(file) if not why_unknown(row, UNKNOWN))
    return [found for row in predictable if (found := _compared(file, row)) is not None]


def unknown() -> list[tuple[Row, str, Compared | None]]:
    """The rows that are not held to a prediction, the reason, and the prediction if there is one."""
    found = [(row, why_unknown(row, UNKNOWN), _compared(file, row)) for file in RULES for row in rows(file)]
    return [(row, why or "that of a compiled rung", at) for row, why, at in found if why or at is None]


def _compared(file: str, row: Row) -> Compared | None:
    reading = by_rule(row, RULES[file])
    if reading is None:
        return None
    at = held(reading.program, reading.on, reading.ranks, reading.records_streams)[reading.mark]
    return beside(row, reading.on, at, reading.figure)


def beside(row: Row, on: str, at: tuple[AtMark, AtMark], figure: str) -> Compared:
    """The row's figure beside that of the allocator, with streams as expected, and as slow as possible."""
    expected, slowest = at
    published, predicted = float(row["value"]) * UNITS[row["unit"]], getattr(expected, figure)
    return Compared(row, on, published, predicted, max(expected.peak_reserved, slowest.peak_reserved))


UNKNOWN: tuple[Unknown, ...] = (
    ("2.7B .* batch 4", "", "", "", "read off plots, in whole GB of which it is not said how many bytes they have"),
    ("optimizer state sharding", "", "", "", "in whole GB; batch and context are not known"),
    ("", "", "init_weights", "", "its function that draws weights is not known; ours allocates nothing"),
)
