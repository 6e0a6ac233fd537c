"""Training on a mesh is that of one process with the whole batch."""

from __future__ import annotations

import pytest

from correctness.mesh.differences import differences, resumption_differs
from correctness.mesh.not_finite import WHERE
from correctness.mesh.not_finite import in_one_process as bad_in_one_process
from correctness.mesh.not_finite import train_on_rank as train_bad_on_rank
from correctness.mesh.training import (
    KINDS,
    in_one_process,
    max_norm_of,
    resume_on_rank,
    train_on_rank,
)
from correctness.support.complaints import assert_none
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

pytestmark = pytest.mark.family("mesh")

MESHES = (
    *("dp=2", "shard=2", "tp=2", "cp=2", "shard=3", "dp=2,ep=2"),
    *("dp=2,tp=2", "dp=2,shard=2", "shard=2,tp=2", "dp=2,cp=2", "dp=2,shard=2,ep=2"),
    *("pp=2", "pp=2,dp=2", "pp=2,shard=2", "pp=2,tp=2"),
)
FEW = ("shard=2", "dp=2,tp=2", "dp=2,ep=2", "pp=2")
LARGE = ("dp=2,shard=3", "dp=2,shard=2,tp=2")
STEPS = 6
"""Number of steps in which every kind of batch occurs, twice: see `batches`."""


@pytest.mark.meshes(*MESHES)
@pytest.mark.parametrize(
    "kind",
    # Random histories have tied weights on single axes.
    [pytest.param(kind, marks=pytest.mark.judged if kind == "tied" else []) for kind in KINDS],
)
def test_steps_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, kind, worlds, device, STEPS)


def _assert_alike(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str, steps: int
) -> None:
    expected = in_one_process(mesh.row_groups, kind, steps)
    assert min(expected.norms) < expected.max_norm < max(expected.norms), "clipping must change some steps, not all"
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, kind, device, steps, expected.max_norm)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.long
@pytest.mark.meshes(*FEW)
def test_twenty_steps_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, "plain", worlds, device, 20)


@pytest.mark.judged
@pytest.mark.meshes("tp=3", "shard=2,cp=2", "cp=2,tp=2", "pp=2,cp=2")
def test_steps_on_more_meshes_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    _assert_alike(implementation, mesh, "plain", worlds, device, STEPS)


@pytest.mark.meshes(*FEW, *LARGE)
def test_micro_batches_in_another_order_give_the_same(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    expected = in_one_process(mesh.row_groups, "experts", 3)
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, "experts", device, 3, expected.max_norm, True)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.long
@pytest.mark.meshes(*FEW)
@pytest.mark.parametrize("kind", ["experts", "frozen_and_unused"])
def test_training_goes_on_from_what_was_saved(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    max_norm = max_norm_of(mesh.row_groups, kind)
    ranks = worlds(mesh.size).run(resume_on_rank, implementation, mesh, kind, device, max_norm)
    assert_none(
        line for rank, (went_on, resumed) in enumerate(ranks) for line in resumption_differs(rank, resumed, went_on)
    )


@pytest.mark.meshes("tp=2", *FEW)
@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=pytest.mark.judged if where == "infinite" else []) for where in WHERE],
)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(
    implementation: Implementation, mesh: Mesh, where: str, worlds: WorldsBySize, device: str
) -> None:
    if where != "everywhere" and "pp" in str(mesh):
        pytest.skip("one stage has nothing to train")
    expected = bad_in_one_process(where, mesh.row_groups)
    ranks = worlds(mesh.size).run(train_bad_on_rank, implementation, mesh, where, device, expected.max_norm)
    for trace in ranks:
        trace.digests = {}
    assert_none(differences(ranks, expected, mesh))
