"""The closed form of clipping, against the meter."""

from __future__ import annotations

import pytest

from correctness.support.metering import device_of_rank, metered
from impl.clipping.cases import ClippingCase
from impl.clipping.workload import ClippingStep
from shardmark.api import Mesh, family
from shardmark.plugin import WorldsBySize


def make_on_rank(mesh: Mesh) -> None:
    mesh.device_mesh(device_of_rank())


@pytest.mark.parametrize("several_meshes", [False, True], ids=["one_mesh", "several_meshes"])
@pytest.mark.parametrize("model", ["tiny", "mini"])
@pytest.mark.meshes("shard=2", "shard=2,tp=2")
def test_peak_is_exact_to_the_byte(mesh: Mesh, model: str, several_meshes: bool, worlds: WorldsBySize) -> None:
    implementation = family("clipping").implementations["by_axes"]
    case = ClippingCase(model, mesh.spec, several_meshes)
    world = worlds(mesh.size)
    world.run(make_on_rank, mesh)  # has 8 bytes of its own
    for memory in world.run(metered, ClippingStep, implementation, case, mesh.size):
        assert memory.tensors == implementation.peak(case, "cpu")
