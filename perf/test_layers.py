"""What do RMSNorm, SwiGLU and rotary embeddings cost, and how near do they come to the memory's bandwidth?"""

from __future__ import annotations

import pytest

from impl.layers.accounting import work
from impl.layers.cases import WIDTHS, LayersCase
from impl.layers.contract import OPERATIONS
from impl.layers.workload import LayersStep
from shardmark.api import Grid, Implementation
from shardmark.plugin.measure import Measure
from shardmark.report.observed_answers import fastest_by

CASES = Grid(
    smoke=[LayersCase("add_rms_norm", tokens=512, dim=256)],
    laptop=[LayersCase(operation, tokens=2048, dim=WIDTHS[operation] // 8) for operation in OPERATIONS],
    paper=[LayersCase(operation, 8192, WIDTHS[operation], "bfloat16", head_dim=128) for operation in OPERATIONS],
    full=[
        LayersCase(operation, 8192, WIDTHS[operation] * by // 4, "bfloat16", head_dim=128)
        for operation in OPERATIONS
        for by in (2, 4, 8, 16)
    ],
)


@pytest.mark.question(
    "What do the layers between matrix products cost, and how near do they come to the memory's bandwidth?",
    short="layers",
    answer=fastest_by("operation"),
    columns=["case", "implementation", "time ms", "GB/s", "of roofline", "ratio to peer", "tensors MiB"],
)
@pytest.mark.family("layers")
@pytest.mark.cases(CASES)
def test_time_and_memory(implementation: Implementation, case: LayersCase, measure: Measure) -> None:
    amount = work(case)
    measure(
        LayersStep,
        implementation,
        case,
        work=amount,
        rates=lambda seconds: {"bytes_per_second": amount.bytes_moved / seconds},
    )
