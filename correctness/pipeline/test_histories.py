"""Any history of a pipeline of any stages is that of one process."""

from __future__ import annotations

import pytest

from correctness.engine.histories_on_ranks import hold_on_ranks
from correctness.pipeline.histories import Player, histories
from correctness.pipeline.training import PYTORCHS
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

HISTORIES_EACH = 16
"""Histories per example that the test's mark counts."""


@pytest.mark.family("pipeline")
@pytest.mark.meshes("pp=2", "pp=3")
@pytest.mark.examples(1, 6, 30)
def test_any_history_is_that_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, examples: int, device: str
) -> None:
    if implementation.spec in PYTORCHS:
        pytest.skip("PyTorch's pipelines send no views, and have other limits: docs/pytorch-defects.md")
    hold_on_ranks(worlds(mesh.size), histories(mesh), Player, implementation, device, HISTORIES_EACH * examples)
