"""Closed forms of tensor parallelism, and its simulation, against the meter."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from correctness.support.communication import recorded
from correctness.support.metering import PASSES, device_of_rank, metered
from impl.distributed import local
from impl.tensor_parallel.accounting import activations, sent, state
from impl.tensor_parallel.cases import TensorParallelCase
from impl.tensor_parallel.workload import ForwardPass, TensorParallelStep
from shardmark.api import Implementation, Mesh, resolve
from shardmark.meter.plan import Plan
from shardmark.meter.saved_tensors import saved_bytes
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.predict import predict
from shardmark.ranks.world import World

SLICED = {"plain": False, "sequence": True, "hidden": True}
MESHES = ("tp=1", "tp=2", "tp=3", "tp=4")


def case_on(mesh: Mesh) -> TensorParallelCase:
    """Its 96 tokens are a multiple of the ranks and chunks of each."""
    return TensorParallelCase("tiny", batch=2, context=48, mesh=mesh.spec)


def state_on_rank(implementation: Implementation, case: TensorParallelCase) -> int:
    step = TensorParallelStep(implementation, case, device_of_rank())
    step.step(lambda part: None)
    trainer = step.trainer
    parameters = [*trainer.parameters.values()]
    moments = [value for each in trainer.optimizer.state.values() for value in each.values()]
    gradients = [each.grad for each in parameters]
    return sum(local(each.detach()).nbytes for each in (*parameters, *gradients, *moments) if each is not None)


@pytest.mark.family("tensor_parallel", only=SLICED)
@pytest.mark.meshes(*MESHES)
def test_state_is_exact_to_the_byte(implementation: Implementation, mesh: Mesh, worlds: WorldsBySize) -> None:
    case = case_on(mesh)
    assert worlds(mesh.size).run(state_on_rank, implementation, case) == [state(case)] * mesh.size


def kept_on_rank(implementation: Implementation, case: TensorParallelCase) -> int | None:
    return saved_bytes(ForwardPass(implementation, case, device_of_rank()))


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.meshes(*MESHES)
def test_activations_are_exact_to_the_byte(name: str, mesh: Mesh, worlds: WorldsBySize) -> None:
    case = case_on(mesh)
    expected = activations(case, sliced=SLICED[name])
    found = worlds(mesh.size).run(kept_on_rank, resolve("tensor_parallel", name), case)
    assert found == [expected] * mesh.size, f"{found} bytes, expected {expected}: {expected.entries}"


def sent_on_rank(implementation: Implementation, case: TensorParallelCase) -> Mapping[str, int]:
    workload = ForwardPass(implementation, case, device_of_rank())
    with recorded() as started:
        workload.step(lambda part: None)
    found: dict[str, int] = {}
    for each in started:
        found[each.name] = found.get(each.name, 0) + each.sent
    return found


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.meshes(*MESHES)
def test_bytes_sent_are_those_of_the_formula(name: str, mesh: Mesh, worlds: WorldsBySize) -> None:
    case = case_on(mesh)
    expected = sent(case, sliced=SLICED[name])
    for found in worlds(mesh.size).run(sent_on_rank, resolve("tensor_parallel", name), case):
        assert sum(found.values()) == expected, f"{found}, expected {expected}: {expected.entries}"


def bytes_of_mesh_on_rank(mesh: Mesh) -> int:
    """Make the mesh, which a process does once, and return the bytes of its ranks' numbers."""
    return mesh.device_mesh(device_of_rank()).mesh.nbytes


def simulated(name: str, mesh: Mesh, world: World) -> int:
    """Bytes of tensors at the peak of a rank's step, predicted, without the mesh's own."""
    own = max(world.run(bytes_of_mesh_on_rank, mesh))
    plan = Plan(TensorParallelStep, resolve("tensor_parallel", name), None, case_on(mesh), "cpu", mesh.size)
    return predict(plan).memory.tensors - own


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.meshes("tp=2", "tp=3", "tp=4")
def test_peak_is_predicted_to_the_byte(name: str, mesh: Mesh, worlds: WorldsBySize) -> None:
    implementation, world = resolve("tensor_parallel", name), worlds(mesh.size)
    expected = simulated(name, mesh, world)
    least = [sys.maxsize] * mesh.size
    for _ in range(PASSES):  # a backend's thread may free memory late
        found = world.run(metered, TensorParallelStep, implementation, case_on(mesh), mesh.size)
        least = [min(old, memory.tensors) for old, memory in zip(least, found, strict=True)]
        if least == [expected] * mesh.size:
            break
    assert least == [expected] * mesh.size


@pytest.mark.sweep  # six predictions of 8 s
@pytest.mark.parametrize("name", ["library", "library_sequence"])
@pytest.mark.meshes("tp=2", "tp=3", "tp=4")
def test_peak_of_pytorchs_own_is_between_those_without_and_with_workspace(
    name: str, mesh: Mesh, worlds: WorldsBySize
) -> None:
    """DTensor has operators of its own inside of PyTorch's: AdamW redistributes gradients, and the cross entropy makes
    a softmax. The meter takes what they allocate for the workspace of the operator around them."""
    implementation, world = resolve("tensor_parallel", name), worlds(mesh.size)
    expected = simulated(name, mesh, world)
    for found in world.run(metered, TensorParallelStep, implementation, case_on(mesh), mesh.size):
        assert found.tensors <= expected <= found.peak
