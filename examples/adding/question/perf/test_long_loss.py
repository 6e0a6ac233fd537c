"""What does the loss cost where the vocabulary is long?"""

from __future__ import annotations

import pytest

from impl.loss import accounting
from impl.loss.cases import LossCase
from impl.loss.workload import LossStep
from shardmark.api import Grid, Implementation
from shardmark.plugin.measure import Measure

CASES = Grid(smoke=[LossCase(32, 8, 2000)], laptop=[LossCase(256, 64, 100_000)], paper=[])


@pytest.mark.family("loss", only=["eager", "chunked"])
@pytest.mark.question("What does the loss cost where the vocabulary is long?", columns=["case", "time ms", "verdict"])
@pytest.mark.cases(CASES)
def test_long_loss(implementation: Implementation, case: LossCase, measure: Measure) -> None:
    measure(LossStep, implementation, case, work=accounting.work(case))
