"""What does the loss cost, in time and in memory, and what is saved by never having all its logits?"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from impl.loss.accounting import eager_peak, work
from impl.loss.cases import LossCase
from impl.loss.workload import LossStep
from shardmark.api import Grid, Implementation, Race, registry
from shardmark.meter.measure_case import metered_peak
from shardmark.plugin.measure import Measure
from shardmark.report.answers import goals
from shardmark.rows.row import Row

CASES = Grid(
    smoke=[LossCase(tokens=256, dim=64, vocab=1000)],
    laptop=[LossCase(tokens=1024, dim=128, vocab=8192)],
    paper=[LossCase(tokens=8192, dim=4096, vocab=vocab, dtype="bfloat16") for vocab in (32768, 128256)],
    full=[
        LossCase(tokens=8192, dim=dim, vocab=vocab, dtype="bfloat16")
        for dim in (2048, 4096)
        for vocab in (32768, 50257, 128256)
    ],
)


pytestmark = pytest.mark.family("loss")


def _measure(measure: Measure, implementation: Implementation, case: LossCase, time: Race | None = None) -> Row:
    amount = work(case)
    return measure(
        LossStep,
        implementation,
        case,
        work=amount,
        rates=lambda seconds: {"flops_per_second": amount.flops / seconds},
        time=time,
    )


@pytest.mark.question("What does the loss cost?", short="loss")
@pytest.mark.cases(CASES)
def test_time_and_memory(implementation: Implementation, case: LossCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@dataclass(frozen=True)
class Goal:
    """`implementation` takes at most `time` times what eager takes for the case.

    Its memory budget is `memory` times eager's peak.
    """

    implementation: str
    time: float
    memory: float
    case: LossCase

    def __str__(self) -> str:
        return f"{self.implementation}-{self.case}"


GOALS = Grid(
    smoke=[],
    laptop=[],
    paper=[Goal("fused_triton", 1.0, 1 / 3 if case.vocab >= 128_000 else 1.0, case) for case in CASES.at("full")],
)


@pytest.mark.question(
    "Does the loss reach its goals?",
    short="loss's goals",
    columns=["case", "implementation", "time ms", "ratio to peer", "goal", "tensors MiB", "verdict"],
    answer=goals,
)
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("loss", case.implementation)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    eager = metered_peak(LossStep, registry.resolve("loss", "eager"), case.case, device)
    row = _measure(measure, implementation, case.case, Race("eager", goal=case.time))
    assert row["memory"]["formula"] <= case.memory * eager_peak(case.case)
    tensors, formula = row["memory"]["tensors"], row["memory"]["formula"]
    assert abs(tensors - formula) <= 0.05 * formula, f"{tensors:,} bytes of tensors, the formula's are {formula:,}"
    assert tensors <= case.memory * eager, f"{tensors:,} bytes of tensors, eager's are {eager:,}"
