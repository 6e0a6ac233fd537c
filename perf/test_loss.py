"""What does the loss cost, in time and in memory, and what is saved by never having all its logits?"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from impl.accounting.loss import eager_peak, work
from shardmark import cases, registry
from shardmark.cases import Grid, LossCase
from shardmark.measure import Measure
from shardmark.memory import meter, release
from shardmark.plan import Mark
from shardmark.registry import Implementation, Race
from shardmark.rows import Row

pytestmark = pytest.mark.family("loss")


class LossStep:
    """Forward and backward of one loss, from random hidden states, with a random target for each."""

    def __init__(self, implementation: Implementation, case: LossCase, device: str) -> None:
        self.loss_of = implementation.adapted
        self.backend = implementation.name
        self.hidden, self.weight = (
            torch.randn(n, case.dim, device=device, dtype=case.torch_dtype).mul_(spread).requires_grad_()
            for n, spread in ((case.tokens, 1.0), (case.vocab, case.dim**-0.5))  # logits of unit variance
        )
        self.targets = torch.randint(case.vocab, (case.tokens,), device=device)
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Let go of the last step's results."""
        self.loss = self.hidden.grad = self.weight.grad = None

    def step(self, mark: Mark) -> None:
        """Both passes."""
        self.loss = self.loss_of(self.hidden, self.weight, self.targets)
        mark("forward")
        self.loss.backward()
        mark("backward")


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


@pytest.mark.question("What does the loss cost?")
@pytest.mark.cases(cases.LOSS)
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
    paper=[Goal("fused_triton", 1.0, 1 / 3 if case.vocab >= 128_000 else 1.0, case) for case in cases.LOSS.paper],
)


@pytest.mark.question("Does the loss reach its goals?")
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("loss", case.implementation)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    eager = metered_peak(registry.resolve("loss", "eager"), case.case, device)
    row = _measure(measure, implementation, case.case, Race("eager", goal=case.time))
    assert row["memory"]["formula"] <= case.memory * eager_peak(case.case)
    assert_within_eagers_peak(row["memory"], eager, case.memory)
    if row["time"]["ratio"] is None:
        pytest.skip("not judged: there is no room for both it and eager")


def assert_within_eagers_peak(memory: Row, eager: int, share: float) -> None:
    """A row's tensors at the peak are within 5% of its formula, and at most `share` times eager's."""
    tensors, formula = memory["tensors"], memory["formula"]
    assert abs(tensors - formula) <= 0.05 * formula, f"{tensors:,} bytes of tensors, the formula's are {formula:,}"
    assert tensors <= share * eager, f"{tensors:,} bytes of tensors, eager's are {eager:,}"


def metered_peak(implementation: Implementation, case: LossCase, device: str) -> int:
    """Bytes of tensors at the peak of one step; the smaller of two, as in the first libraries take their workspaces."""
    peaks = []
    for _ in range(2 if device == "cuda" else 1):
        release(device)
        with meter(device) as memory:
            step = LossStep(implementation, case, device)
            step.prepare()
            memory.reset_peak()
            step.step(lambda part: None)
        peaks.append(memory.tensors)
        del step
    release(device)
    return min(peaks)
