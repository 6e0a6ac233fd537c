"""Training with tensor parallelism is that of one process."""

from __future__ import annotations

import pytest

from correctness.mesh.differences import differences
from correctness.support.complaints import assert_none
from correctness.tensor_parallel.training import KINDS, STEPS, in_one_process, train_on_rank
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

pytestmark = pytest.mark.family("tensor_parallel")

BY_SIZES = ("even", "sizes_that_do_not_divide", "few_kv_heads")
"""Kinds for which the number of ranks matters. The others are left to random histories, and to the judge on two ranks
of tp."""


def _on_other_meshes(kind: str) -> list[pytest.MarkDecorator]:
    """More ranks show little of kinds that two ranks have passed, but of sizes that they do not divide."""
    if kind == "sizes_that_do_not_divide":
        return []
    return [pytest.mark.judged if kind in BY_SIZES else pytest.mark.sweep]


@pytest.mark.meshes("tp=2", "shard=2,tp=2")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in BY_SIZES else pytest.mark.judged) for kind in KINDS]
)
def test_steps_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    """Losses, norms, every gradient and every parameter; whole parameters are bitwise equal on all ranks."""
    _assert_alike(implementation, mesh, kind, worlds, device, STEPS)


def _assert_alike(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str, steps: int
) -> None:
    expected = in_one_process(mesh.row_groups, kind, steps)
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, kind, device, steps)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.meshes("shard=2,tp=2")
def test_twenty_steps_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, "even", worlds, device, 20)


@pytest.mark.meshes("tp=1", "tp=3", "tp=4", "tp=2,dp=2")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_on_other_meshes(kind)) for kind in KINDS])
def test_first_steps_on_other_meshes_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, kind, worlds, device, STEPS)


@pytest.mark.meshes("shard=2,tp=2")
def test_recomputing_a_forward_pass_changes_nothing(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    expected = in_one_process(mesh.row_groups, "even", 2)
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, "even", device, 2, True)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.meshes("dp=2,shard=2,tp=2")
def test_steps_inside_of_hybrid_sharding_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, "even", worlds, device, 3)
