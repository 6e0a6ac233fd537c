"""How many blocks under one checkpoint need the least memory, and what do checkpoints within checkpoints reach?

Two problems of CS336's second assignment (2026), whose xl is the model "2.7b". Its answer needs no GPU:

    pytest perf/test_checkpoint_segments.py --scale paper --simulate h100-80gb
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from impl.checkpointing.cases import SegmentsCase
from impl.checkpointing.nesting import Series, again, most_inputs, numbers
from impl.training_step.accounting import work
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import CheckpointedStep
from shardmark.api import Grid, Implementation
from shardmark.meter.plan import Measured, Rounds
from shardmark.plugin.measure import Measure
from shardmark.report.plots import Lines
from shardmark.report.ranking import tensors
from shardmark.report.words import called, figure, sentence, share, size
from shardmark.rows.columns import Column, Entry
from shardmark.rows.observers import Observer
from shardmark.rows.row import Row

LENGTHS = {"smoke": (1, 4), "laptop": (1, 2, 4, 8, 16), "paper": (1, 2, 4, 6, 8, 16, 32)}
NESTED = Grid(
    smoke=[TrainingStepCase("deep", batch=2, context=64)],
    laptop=[TrainingStepCase("deep", batch=8, context=256)],
    paper=[TrainingStepCase("2.7b", batch=4, context=2048)],
)


def _in_segments(scale: str) -> list[SegmentsCase]:
    return [
        SegmentsCase(case.model, case.batch, case.context, length=length)
        for case in NESTED.at(scale)
        for length in LENGTHS[scale]
    ]


SEGMENTS = Grid(*map(_in_segments, LENGTHS))


class Counted(Observer):
    """How often a block's forward runs in a step, on average, and the most inputs of blocks that are in memory."""

    of_memory = True

    def __init__(self, series: Series) -> None:
        self.series = series

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's work: "forwards" and "inputs"."""
        blocks = sum(1 for nest in self.series for _ in numbers(nest))
        counted: Any = {"forwards": 1 + sum(again(self.series)) / blocks, "inputs": most_inputs(self.series)}
        row["work"] |= counted


FORWARDS = Column(
    "forwards", lambda entry, row: f"{row['work']['forwards']:.2f}" if "forwards" in row["work"] else None
)
INPUTS = Column("inputs", lambda entry, row: f"{row['work']['inputs']}" if "inputs" in row["work"] else None)


def answer(entries: Sequence[Entry]) -> str | None:
    """The length of segments that needs least memory, and what nested checkpoints need beside it."""
    metered = [entry for entry in entries if tensors(entry) is not None]
    by_length = {n: entry for entry in metered if (n := entry["extra_info"]["case"].get("length")) is not None}
    if not by_length:
        return None
    peaks = {length: tensors(entry) for length, entry in by_length.items()}
    least = min(peaks, key=peaks.__getitem__)
    said = [f"segments of {least} need the least memory of those of {', '.join(map(str, sorted(peaks)))}"]
    said[0] += f", {size(peaks[least])}"
    for entry in metered:
        if "length" not in entry["extra_info"]["case"]:
            said.append(f"{called(entry)} takes {share(tensors(entry) / peaks[least], 'memory')}{_counted(entry)}")
    case = by_length[least]["extra_info"]["case"]
    return sentence(f"With {case['batch'] * case['context']:,} tokens of the {case['model']} model", "; ".join(said))


def _counted(entry: Entry) -> str:
    work = entry["extra_info"]["work"]
    if "inputs" not in work:
        return ""
    return f" with {work['inputs']} block inputs, and runs a block {figure(work['forwards'])} times"


QUESTION = pytest.mark.question(
    "How many blocks under one checkpoint need the least memory?",
    short="checkpointed segments",
    columns=["case", "implementation", "time ms", FORWARDS, INPUTS, "tensors MiB", "verdict"],
    answer=answer,
    plots=[
        Lines(
            "Peak memory by blocks in a segment",
            x="case.length",
            x_title="blocks in a segment",
            y="memory.tensors",
            y_title="tensors at the peak",
            unit="B",
        )
    ],
)


@pytest.mark.family("checkpointing", option="length")
@QUESTION
@pytest.mark.cases(SEGMENTS)
def test_segments(implementation: Implementation, case: SegmentsCase, device: str, measure: Measure) -> None:
    _measure(implementation, case, device, measure)


@pytest.mark.family("checkpointing", only=("none", "recursive"))
@QUESTION
@pytest.mark.cases(NESTED)
def test_nested(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    """Checkpoints within checkpoints, and no checkpoint."""
    _measure(implementation, case, device, measure)


def _measure(implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure) -> None:
    """No race: steps of two lengths are two cases, and how much runs again is counted."""
    policy = implementation.facts  # its formulas; None for a user's own
    row = measure(
        CheckpointedStep,
        replace(implementation, time=None),
        case,
        work=work(case),
        slack=1.02,
        rounds=Rounds(minimum=1, max_seconds=0.1),
        observe=[] if policy is None else [Counted(policy.series(case))],
    )
    if device == "cpu" and policy is not None and "tensors" in row["memory"]:
        assert row["memory"]["tensors"] >= 0.98 * row["memory"]["formula"], "the formula is more than 2% over the peak"
