"""What does clipping by the norm cost on a mesh, beside PyTorch's own?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.clipping.accounting import work
from impl.clipping.cases import CASES, MESHES, ClippingCase
from impl.clipping.workload import ClippingStep
from shardmark.api import Implementation, Mesh
from shardmark.plugin.measure import Measure


@pytest.mark.question(
    "What does clipping by the norm cost on a mesh?",
    short="clipping on a mesh",
    columns=["case", "implementation", "time ms", "ratio to peer", "goal", "tensors MiB", "verdict"],
)
@pytest.mark.family("clipping")
@pytest.mark.cases(CASES)
@pytest.mark.meshes(*MESHES, smoke=MESHES[1:])
def test_clipping(implementation: Implementation, case: ClippingCase, mesh: Mesh, measure: Measure) -> None:
    case = replace(case, mesh=mesh.spec)
    measure(ClippingStep, implementation, case, world_size=mesh.size, work=work(case), slack=1.02)
