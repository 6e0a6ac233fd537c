"""What does each axis of a mesh save, and what does it send?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.mesh.accounting import tokens, work
from impl.mesh.cases import CASES, MESHES, MeshCase
from impl.mesh.workload import MeshStep
from shardmark.api import Implementation, Mesh, OwnModelCase
from shardmark.plugin.measure import Measure
from shardmark.report.answers import saves
from shardmark.rows.observers import SentByAxis


@pytest.mark.question(
    "What does each axis of a mesh save, and what does it send?",
    short="meshes",
    columns=["case", "implementation", "time ms", "sent by axis MiB", "ratio to peer", "tensors MiB", "verdict"],
    answer=saves(),
)
@pytest.mark.family("mesh")
@pytest.mark.cases(CASES)
@pytest.mark.meshes(*MESHES)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(
    implementation: Implementation, case: MeshCase | OwnModelCase, mesh: Mesh, measure: Measure
) -> None:
    case = replace(case, mesh=mesh.spec)
    measure(
        MeshStep,
        implementation,
        case,
        world_size=mesh.size,
        work=work(case),
        rates=lambda seconds: {"tokens_per_second": tokens(case) / seconds} if isinstance(case, MeshCase) else {},
        slack=1.02,
        observe=[SentByAxis()],
    )
