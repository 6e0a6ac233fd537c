"""Dropout of a parallel model: alike on copies, other values of each slice of the tokens and of each rank's heads."""

from __future__ import annotations

import pytest

from correctness.support.complaints import assert_none
from correctness.tensor_parallel.dropout import SHAPES, complaints, drop_on_rank
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize


@pytest.mark.family("tensor_parallel")
@pytest.mark.meshes("tp=2", "tp=3", "dp=2,tp=2")
@pytest.mark.parametrize("place", SHAPES)
def test_dropout_leaves_out_what_one_process_might(
    implementation: Implementation, mesh: Mesh, place: str, worlds: WorldsBySize, device: str
) -> None:
    """Each token, head, layer, call and group of rows loses other values, all ranks of `tp` use the same, and backward
    passes, recomputed ones too, use those of forward."""
    ranks = worlds(mesh.size).run(drop_on_rank, implementation, mesh, place, device)
    assert_none(complaints(ranks, mesh, place))
