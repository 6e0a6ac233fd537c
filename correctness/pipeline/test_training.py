"""Training by a pipeline is that of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from correctness.pipeline.stages import KINDS
from correctness.pipeline.training import PYTORCHS, differences, in_one_process, train_on_rank
from correctness.support.complaints import assert_none
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

RANDOM = ("several_outputs", "sometimes_unused_outputs", "numbers_first", "views", "passes_on_what_it_has", "frozen")
"""Kinds that random histories have."""
ON_MORE_RANKS = ("plain", "several_outputs", "numbers_first", "tied")
"""Kinds of stages for which it matters how many lie between the first and the last; the sweep has the others."""
STEPS = 3
LOSE_GRADIENTS = ("torch_interleaved_zero_bubble", "torch_zero_bubble_v", "torch_dualpipe_v")

pytestmark = pytest.mark.family("pipeline")


def _known(implementation: Implementation, kind: str) -> str | None:
    """Why PyTorch's own is wrong for such stages, if it is."""
    if kind == "frozen" and implementation.name in LOSE_GRADIENTS:
        return "its stage behind a frozen one has no gradients: docs/pytorch-defects.md"
    if kind == "hook_on_its_input" and implementation.name in PYTORCHS:
        return "hooks on what it receives pile up from step to step: docs/pytorch-defects.md"
    if kind == "buffers" and implementation.name in PYTORCHS:
        return "it tries each stage before the first step: docs/pytorch-defects.md"
    if kind == "views" and implementation.name in PYTORCHS:
        return "it sends no view whose rows are not one after the other: docs/pytorch-defects.md"
    if kind == "complex_numbers" and implementation.name in PYTORCHS:
        return "it takes complex outputs for ones without a gradient: docs/pytorch-defects.md"
    return None


@pytest.fixture
def train(
    implementation: Implementation, worlds: WorldsBySize, device: str, request: pytest.FixtureRequest
) -> Callable[..., None]:
    """Trains stages of a kind on a mesh, and compares with one process: losses, the gradients of the first step, and
    parameters and buffers after the steps."""

    def compare(mesh: Mesh, kind: str, steps: int = STEPS) -> None:
        if why := _known(implementation, kind):
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))
        count = 8
        ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, kind, count, device, steps, True)
        assert_none(differences(ranks, in_one_process(kind, ranks[0].stages, count, steps, True)))

    return compare


def _marks(kind: str) -> list[pytest.MarkDecorator]:
    """Stages, not schedules, differ between kinds: schedules that are tested briefly have two of them each time."""
    if kind in RANDOM:
        return [pytest.mark.judged]
    return [] if kind in ("plain", "tied") else [pytest.mark.large]


@pytest.mark.meshes("pp=2")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_marks(kind)) for kind in KINDS])
def test_steps_are_those_of_one_process(train: Callable[..., None], mesh: Mesh, kind: str) -> None:
    train(mesh, kind)


@pytest.mark.long
@pytest.mark.meshes("pp=2")
def test_twenty_steps_are_those_of_one_process(train: Callable[..., None], mesh: Mesh) -> None:
    train(mesh, "plain", 20)


@pytest.mark.long
@pytest.mark.meshes("pp=3", "pp=4")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ON_MORE_RANKS else pytest.mark.sweep) for kind in KINDS]
)
def test_steps_on_more_ranks_are_those_of_one_process(train: Callable[..., None], mesh: Mesh, kind: str) -> None:
    train(mesh, kind)


@pytest.mark.meshes("pp=2", "pp=4")
@pytest.mark.parametrize("kind", ["plain", "several_outputs"])
def test_micro_batches_may_differ_in_rows(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    """The second step's are other ones than the first's, and each target counts once."""
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, kind, 8, device, 3, False)
    assert_none(differences(ranks, in_one_process(kind, ranks[0].stages, 8, 3, False)))


@pytest.mark.meshes("pp=1", "pp=2", "pp=3", "pp=4", "pp=2,dp=2")
@pytest.mark.parametrize("count", [1, 3, 5])
def test_any_number_of_micro_batches(
    implementation: Implementation, mesh: Mesh, count: int, worlds: WorldsBySize, device: str
) -> None:
    """More than stages, and fewer; beside another pipeline, on ranks that are not neighbours."""
    ranks = worlds(mesh.size).run(train_on_rank, implementation, mesh, "plain", count, device, 2, True)
    assert_none(differences(ranks, in_one_process("plain", ranks[0].stages, count, 2, True)))
