"""What does tensor parallelism save and cost by degree?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.tensor_parallel.accounting import tokens, work
from impl.tensor_parallel.cases import CASES, DEGREES, TensorParallelCase
from impl.tensor_parallel.workload import TensorParallelStep
from shardmark.api import Implementation, Mesh
from shardmark.plugin.measure import Measure
from shardmark.report.answers import saves
from shardmark.rows.observers import SentByAxis


@pytest.mark.question(
    "What does tensor parallelism save and cost by degree?",
    short="tensor parallelism",
    columns=["case", "implementation", "time ms", "sent by axis MiB", "ratio to peer", "tensors MiB", "verdict"],
    answer=saves(),
)
@pytest.mark.family("tensor_parallel")
@pytest.mark.cases(CASES)
@pytest.mark.meshes(*DEGREES, smoke=["tp=2"])
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: TensorParallelCase, mesh: Mesh, measure: Measure) -> None:
    case = replace(case, mesh=mesh.spec)
    measure(
        TensorParallelStep,
        implementation,
        case,
        world_size=mesh.size,
        work=work(case),
        rates=lambda seconds: {"tokens_per_second": tokens(case) / seconds},
        slack=1.02,
        observe=[SentByAxis()],
    )
