"""What does softmax cost?"""

from __future__ import annotations

import pytest

from impl.softmax.cases import SoftmaxCase
from impl.softmax.workload import SoftmaxStep
from shardmark.api import Grid, Implementation, Work
from shardmark.plugin.measure import Measure

CASES = Grid(smoke=[SoftmaxCase(1000)], laptop=[SoftmaxCase(100_000)], paper=[SoftmaxCase(10_000_000)])


@pytest.mark.family("softmax")
@pytest.mark.question("What does softmax cost?")
@pytest.mark.cases(CASES)
def test_softmax(implementation: Implementation, case: SoftmaxCase, measure: Measure) -> None:
    measure(SoftmaxStep, implementation, case, work=Work(flops=3 * case.elements))
