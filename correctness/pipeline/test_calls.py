"""Single steps of a pipeline: gradients that accumulate, errors, and what is held."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from correctness.pipeline.calls import (
    COUNT,
    accumulate_on_rank,
    complaints_of_memory,
    die_on_rank,
    note_on_rank,
    of_one_step,
    refuse_on_rank,
    sent_that_is_alive_on_rank,
    step_after_an_error_on_rank,
    step_with_other_numbers_on_rank,
)
from correctness.pipeline.training import PYTORCHS, differences
from correctness.support.complaints import assert_none
from impl.pipeline import Facts
from impl.pipeline.deferred import Later, deferring, prepare
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import RankError


@pytest.mark.family("pipeline")
@pytest.mark.meshes("pp=2")
def test_gradients_accumulate_and_are_not_scaled(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """Three steps of the same batch give three times its gradients: scaling again in each step is wrong."""
    ranks = worlds(mesh.size).run(accumulate_on_rank, implementation, mesh, device, 3)
    stages = 1 + max(int(name.partition(".")[0]) for own in ranks for name in own.parameters)
    assert_none(differences(ranks, of_one_step(stages, 3)))


@pytest.mark.large  # its ranks end, and others start
@pytest.mark.family("pipeline")
@pytest.mark.meshes("pp=2")
def test_an_error_in_a_stage_is_raised_on_its_rank(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """With its own traceback; no rank waits for ever."""
    with pytest.raises(RankError, match=r"Refused: the last stage takes no third micro-batch"):
        worlds(mesh.size).run(refuse_on_rank, implementation, mesh, device)


@pytest.mark.family("pipeline")
@pytest.mark.meshes("pp=1")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_one_that_raised_is_that_of_one_process(
    implementation: Implementation,
    mesh: Mesh,
    where: str,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing of the step that raised is left but gradients. One rank, as others would wait."""
    if implementation.spec in PYTORCHS:
        why = "PyTorch's schedules keep losses of a step that raised: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    ((alive, trained),) = worlds(mesh.size).run(step_after_an_error_on_rank, implementation, mesh, where, device)
    stages = 1 + max(int(name.partition(".")[0]) for name in trained.parameters)
    assert_none(
        [*(f"{what} is alive after the error" for what in alive), *differences([trained], of_one_step(stages, 1))]
    )


@pytest.mark.meshes("pp=2")
def test_a_rank_that_dies_in_a_step_is_named(mesh: Mesh, worlds: WorldsBySize, device: str) -> None:
    """And the other one is told that its neighbour is gone, and waits no longer."""
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL(.|\n)*rank 0 of 2 raised RuntimeError"):
        worlds(mesh.size).run(die_on_rank, mesh, device)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_a_layers_gradients_are_the_same_now_and_later(shape: tuple[int, ...], device: str) -> None:
    """The input may be a vector. The gradient of the bias is found at once."""
    layer, x = nn.Linear(4, 5).double().to(device), torch.randn(shape, dtype=torch.float64, device=device)
    layer(x).sin().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    prepare(layer)
    later = Later()
    with deferring(later):
        layer(x).sin().sum().backward()
    assert layer.weight.grad is None
    later.find()
    for parameter, right in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-14, atol=0)


@pytest.mark.long
@pytest.mark.family("pipeline")
@pytest.mark.meshes("pp=2", "pp=4")
@pytest.mark.parametrize("count", [COUNT, 8])
def test_forward_passes_are_held_as_long_as_stated(
    implementation: Implementation, mesh: Mesh, count: int, worlds: WorldsBySize, device: str
) -> None:
    """None is left after a step, nor inputs, targets and outputs; and during one, where a schedule states a number, no
    more than that."""
    ranks = worlds(mesh.size).run(note_on_rank, implementation, mesh, count, device)
    facts = implementation.facts
    stated = facts.in_flight(mesh.size, count) if isinstance(facts, Facts) and facts.in_flight else None
    assert_none(complaints_of_memory(ranks, stated, count))


@pytest.mark.meshes("pp=2")
def test_another_number_of_micro_batches_is_refused_in_one_line(mesh: Mesh, worlds: WorldsBySize, device: str) -> None:
    for said in worlds(mesh.size).run(step_with_other_numbers_on_rank, mesh, device):
        assert said == [
            "it was made for 4 micro-batches: these are 5 inputs and 5 targets",
            "it was made for 4 micro-batches: these are 4 inputs and 2 targets",
        ]


@pytest.mark.meshes("pp=2")
def test_sends_are_not_kept_until_the_end(mesh: Mesh, worlds: WorldsBySize, device: str) -> None:
    """1F1B holds as many micro-batches as there are stages; those that the other rank has taken are let go."""
    assert max(worlds(mesh.size).run(sent_that_is_alive_on_rank, mesh, device)) <= 4
