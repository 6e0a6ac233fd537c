"""A training step on a mesh, as several questions measure it."""

from __future__ import annotations

from impl.mesh.accounting import tokens, work
from impl.mesh.cases import MeshCase
from impl.mesh.workload import MeshStep
from shardmark.api import Implementation, Mesh, OwnModelCase
from shardmark.plugin.measure import Measure
from shardmark.rows.observers import SentByAxis


def measure_step(measure: Measure, implementation: Implementation, case: MeshCase | OwnModelCase, mesh: Mesh) -> None:
    """Measure the case, whose mesh that is, with the bytes that it sends along each axis."""
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
