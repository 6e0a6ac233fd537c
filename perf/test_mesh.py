"""What does each axis of a mesh save, and what does it send?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.mesh.cases import CASES, MESHES, MeshCase
from perf.mesh_step import measure_step
from shardmark.api import Implementation, Mesh, OwnModelCase
from shardmark.plugin.measure import Measure
from shardmark.report.answers import saves


@pytest.mark.question(
    "What does each axis of a mesh save, and what does it send?",
    short="meshes",
    columns=["case", "implementation", "time ms", "sent by axis MiB", "ratio to peer", "tensors MiB", "verdict"],
    answer=saves(),
)
@pytest.mark.family("mesh")
@pytest.mark.cases(CASES)
@pytest.mark.meshes(*MESHES, smoke=MESHES[:4])
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(
    implementation: Implementation, case: MeshCase | OwnModelCase, mesh: Mesh, measure: Measure
) -> None:
    measure_step(measure, implementation, replace(case, mesh=mesh.spec), mesh)
