"""The suite's own tensor parallelism inside of data parallelism, FSDP and ZeRO that know nothing of DTensors, and with
layers that are compiled."""

from __future__ import annotations

import pytest

from correctness.mesh.differences import differences
from correctness.support.complaints import assert_none
from correctness.tensor_parallel.around import AROUND, complaints, in_one_process, train_on_rank
from correctness.tensor_parallel.training import in_one_process as traced_in_one_process
from correctness.tensor_parallel.training import train_on_rank as trace_on_rank
from shardmark.api import Implementation, Mesh, requires_compiler
from shardmark.plugin import WorldsBySize

OURS = ("plain", "sequence", "hidden")


@pytest.mark.family("tensor_parallel", only=OURS)
@pytest.mark.meshes("dp=2,tp=2")
@pytest.mark.parametrize("kind", ["even", "tied", "few_kv_heads"])
@pytest.mark.parametrize("around", AROUND)
def test_steps_inside_of_wrappers_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, around: str, kind: str, worlds: WorldsBySize, device: str
) -> None:
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, around, kind, device)
    assert_none(complaints(ranks, in_one_process(mesh.row_groups, kind)))


@pytest.mark.sweep
@pytest.mark.family("tensor_parallel", only=OURS)
@pytest.mark.meshes("tp=2", "shard=2,tp=2")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_steps_of_compiled_layers_are_those_of_one_process(
    implementation: Implementation, mesh: Mesh, backend: str, worlds: WorldsBySize, device: str
) -> None:
    if backend == "inductor" and (why := requires_compiler(device)):
        pytest.skip(why)
    expected = traced_in_one_process(mesh.row_groups, "even", 2)
    ranks = worlds(mesh.size).run(trace_on_rank, implementation, mesh, "even", device, 2, False, backend)
    assert_none(differences(ranks, expected, mesh))
