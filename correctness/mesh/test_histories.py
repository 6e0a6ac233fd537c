"""Any history of training on a mesh is that of one process."""

from __future__ import annotations

import pytest

from correctness.engine.histories_on_ranks import hold_on_ranks
from correctness.mesh.histories import Player, histories
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

HISTORIES_EACH = 3
"""Histories per example that the test's mark counts."""


# On two ranks both directions of a ring are one, and each stage is the first or the last.
@pytest.mark.family("mesh")
@pytest.mark.meshes("dp=2", "shard=2", "tp=2", "cp=3", "pp=3")
@pytest.mark.examples(1, 2, 20)
def test_any_history_is_that_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, examples: int, device: str
) -> None:
    hold_on_ranks(worlds(mesh.size), histories(mesh), Player, implementation, device, HISTORIES_EACH * examples)
