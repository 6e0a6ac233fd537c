"""The simulation of a mesh's step, against the meter."""

from __future__ import annotations

import sys

import pytest

from correctness.support.metering import PASSES, device_of_rank, metered
from impl.mesh.cases import MESHES, MeshCase
from impl.mesh.workload import MeshStep
from shardmark.api import Mesh, resolve
from shardmark.meter.plan import Plan
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.predict import predict

TAKEN = {
    "naive": MESHES,
    "library": MESHES,
    "replicated": [mesh for mesh in MESHES if "shard" not in mesh],
}


def bytes_of_mesh_on_rank(mesh: Mesh) -> int:
    """Make the mesh, which a process does once, and return the bytes of its ranks' numbers."""
    return mesh.device_mesh(device_of_rank()).mesh.nbytes


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, taken in TAKEN.items() for spec in taken])
def test_peak_is_predicted_to_the_byte(name: str, spec: str, worlds: WorldsBySize) -> None:
    implementation, case, size = resolve("mesh", name), MeshCase("tiny", 2, 32, spec), Mesh.parse(spec).size
    world = worlds(size)
    own = max(world.run(bytes_of_mesh_on_rank, Mesh.parse(spec)))
    expected = predict(Plan(MeshStep, implementation, None, case, "cpu", size)).memory.tensors - own
    least = [sys.maxsize] * size
    for _ in range(PASSES):  # a backend's thread may free memory late
        found = world.run(metered, MeshStep, implementation, case, size)
        least = [min(old, memory.tensors) for old, memory in zip(least, found, strict=True)]
        if least == [expected] * size:
            break
    assert least == [expected] * size
