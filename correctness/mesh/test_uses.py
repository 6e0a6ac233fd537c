"""Programs use a mesh and a model in more ways than the plain loop does."""

from __future__ import annotations

import pytest

from correctness.mesh.differences import differences
from correctness.mesh.training import in_one_process, max_norm_of, train_on_rank
from correctness.mesh.uses import (
    APART,
    SIDE_BY_SIDE,
    STEPS,
    USES,
    apart_in_one_process,
    train_apart,
    train_side_by_side,
    train_with,
    used_in_one_process,
)
from correctness.support.complaints import assert_none
from impl.mesh.contract import makes_trainer
from shardmark.api import Implementation, Mesh, NotAsked
from shardmark.plugin import WorldsBySize

pytestmark = pytest.mark.family("mesh")


@pytest.mark.long
@pytest.mark.meshes("dp=2", "shard=2", "tp=2", "cp=2")
@pytest.mark.parametrize("use", USES)
def test_a_model_is_used_as_one_process_uses_it(
    implementation: Implementation,
    mesh: Mesh,
    use: str,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    if use == "inference mode" and implementation.spec == "library" and "tp" not in mesh.sizes:
        why = "FSDP2 keeps memory that inference mode made: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why))
    if makes_trainer(implementation.target):
        raise NotAsked("a trainer has passes of its own: asked of parallelize(model, mesh)")
    expected = used_in_one_process(mesh.row_groups, use)
    ranks = worlds(mesh.size).run(train_with, implementation, mesh, use, device, expected.max_norm)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.long
@pytest.mark.meshes("dp=2", "shard=2", "tp=2", "cp=2", "pp=2")
@pytest.mark.parametrize("looked_at", range(len(SIDE_BY_SIDE)))
def test_two_trainers_take_turns(
    implementation: Implementation, mesh: Mesh, looked_at: int, worlds: WorldsBySize, device: str
) -> None:
    max_norms = [max_norm_of(mesh.row_groups, kind) for kind in SIDE_BY_SIDE]
    expected = in_one_process(mesh.row_groups, SIDE_BY_SIDE[looked_at], STEPS)
    ranks = worlds(mesh.size).run(train_side_by_side, implementation, mesh, device, max_norms, looked_at)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.long
@pytest.mark.meshes("dp=2,tp=1", "dp=1,shard=2", "shard=2,cp=1", "dp=1,tp=2", "pp=2,dp=1", "tp=2,dp=2", "dp=2,pp=2")
def test_axes_come_in_any_order_and_may_have_one_rank(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    expected = in_one_process(mesh.row_groups, "plain", STEPS)
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, "plain", device, STEPS, expected.max_norm)
    assert_none(differences(ranks, expected, mesh))


@pytest.mark.long
@pytest.mark.meshes("dp=2", "shard=2", "tp=2", "cp=2", "pp=2")
def test_a_mesh_may_be_a_slice_of_a_larger_one(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    max_norm = max_norm_of(mesh.row_groups, "plain")
    ranks = worlds(APART * mesh.size).run(train_apart, implementation, mesh, device, max_norm)
    for which in range(APART):
        own = ranks[which * mesh.size : (which + 1) * mesh.size]
        assert_none(differences(own, apart_in_one_process(which, mesh.row_groups), mesh))
