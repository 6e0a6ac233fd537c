"""Clipping on a mesh: each parameter counts once, and all are scaled alike."""

from __future__ import annotations

import math

import pytest
import torch

from correctness.clipping.drawn import KINDS, clip_drawn_on_rank, complex_ones, drawn, drawn_differences, many
from correctness.clipping.gradients import (
    clip_an_iterator_on_rank,
    clip_nothing_on_rank,
    clip_on_rank,
    clip_sums_on_rank,
    differences,
    norms_on_rank,
    placed,
    wholes,
)
from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.support.communication import recorded
from correctness.support.complaints import assert_none
from correctness.support.metering import peak_of_a_step
from impl.clipping import gathered_norm, total_norm
from impl.clipping.cases import ClippingCase
from impl.clipping.workload import ClippingStep
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

pytestmark = pytest.mark.family("clipping")

MESHES = ("shard=2", "dp=2,tp=2", "shard=3,tp=2", "dp=1,shard=2")
NORM_TYPES = (1.0, 2.0, 3.5, math.inf)
EMPTY_PARTS = "it refuses parts that are empty"
ON = {"one_mesh": False, "several_meshes": True}


def _known(request: pytest.FixtureRequest, implementation: Implementation, wrong: bool, why: str) -> None:
    """Expect the failure of a defect of PyTorch's that is described."""
    if wrong and implementation.spec == "library":
        request.applymarker(pytest.mark.xfail(reason=f"{why}: docs/pytorch-defects.md"))


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.meshes(*MESHES)
def test_each_parameter_counts_once(
    implementation: Implementation,
    mesh: Mesh,
    norm_type: float,
    on: str,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """With any placement, in every norm, and with parts that are empty."""
    _known(request, implementation, norm_type == math.inf, EMPTY_PARTS)
    gradients, max_norm = wholes(torch.float64, ON[on]), 0.5
    ranks = worlds(mesh.size).run(clip_on_rank, implementation, mesh, gradients, max_norm, norm_type, device)
    assert_none(differences(ranks, gradients, max_norm, norm_type))


@pytest.mark.examples(12, 40, 400)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.meshes("shard=2", "dp=2,tp=2", "dp=1,shard=2,tp=2")
def test_gradients_of_all_kinds_count_once(
    implementation: Implementation,
    mesh: Mesh,
    kind: str,
    examples: int,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """They are drawn at random."""
    _known(request, implementation, kind == "largest", EMPTY_PARTS)
    found = [drawn(torch.initial_seed() + number, mesh, kind) for number in range(examples)]
    ranks = worlds(mesh.size).run(clip_drawn_on_rank, implementation, mesh, found, device)
    for number, example in enumerate(found):
        assert_none(drawn_differences([clipped[number] for clipped in ranks], example))


@pytest.mark.parametrize("norm_type", [2.0, 3.0])
@pytest.mark.meshes("shard=2", "dp=2,tp=2")
def test_complex_gradients_count_with_their_absolute_values_or_are_an_error(
    implementation: Implementation, mesh: Mesh, norm_type: float, worlds: WorldsBySize, device: str
) -> None:
    example = complex_ones(norm_type, mesh)
    ranks = worlds(mesh.size).run(clip_drawn_on_rank, implementation, mesh, [example], device)
    assert_none(drawn_differences([clipped[0] for clipped in ranks], example))


@pytest.mark.examples(1, 4, 15)
@pytest.mark.meshes("shard=2")
def test_any_number_of_gradients_counts(
    implementation: Implementation, mesh: Mesh, examples: int, worlds: WorldsBySize, device: str
) -> None:
    """With large ones among them; 257 is a prime, and no multiple of what a launch, or a bucket, may take. To a sum of
    hundreds bfloat16 adds nothing more."""
    found = [many(count, mesh) for count in (257, *BESIDE_LAUNCHES)[:examples]] + [many(509, mesh, torch.bfloat16)]
    ranks = worlds(mesh.size).run(clip_drawn_on_rank, implementation, mesh, found, device)
    for number, example in enumerate(found):
        assert_none(drawn_differences([clipped[number] for clipped in ranks], example))


@pytest.mark.parametrize(
    ("size", "max_norm"), [(1.0, 0.5), (3e3, 0.5), (1.2e4, 0.02)], ids=["usual", "large", "largest"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.meshes("shard=2", "dp=2,tp=2")
def test_in_few_bits(
    implementation: Implementation,
    mesh: Mesh,
    dtype: torch.dtype,
    size: float,
    max_norm: float,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """Squares of the large ones overflow float16. The norm of the largest does too; their scale is subnormal."""
    _known(request, implementation, dtype == torch.float16 and size > 1, "it squares in float16")
    gradients = wholes(dtype, False, size)
    ranks = worlds(mesh.size).run(clip_on_rank, implementation, mesh, gradients, max_norm, 2.0, device)
    assert_none(differences(ranks, gradients, max_norm, 2.0))


@pytest.mark.meshes("shard=2", "dp=2,tp=2")
def test_below_the_norm_nothing_changes(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    gradients = wholes(torch.float64, False)
    ranks = worlds(mesh.size).run(clip_on_rank, implementation, mesh, gradients, 1e6, 2.0, device)
    assert_none(differences(ranks, gradients, 1e6, 2.0))


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.meshes("shard=2", "dp=2,tp=2")
def test_what_is_not_finite_is_seen_by_every_rank(
    implementation: Implementation,
    mesh: Mesh,
    value: float,
    norm_type: float,
    on: str,
    worlds: WorldsBySize,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """A NaN too, which is neither smaller nor larger than any number: the largest of several may miss it."""
    _known(request, implementation, norm_type == math.inf, EMPTY_PARTS)
    ranks = worlds(mesh.size).run(norms_on_rank, implementation, mesh, ON[on], value, norm_type, device)
    for index, norms in enumerate(zip(*ranks, strict=True)):
        assert not any(map(math.isfinite, norms)), f"gradient {index}: {norms}"


@pytest.mark.meshes("shard=2")
def test_parameters_may_be_an_iterator(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """As `model.parameters()` is one."""
    ranks = worlds(mesh.size).run(clip_an_iterator_on_rank, implementation, mesh, device)
    assert_none(differences(ranks, wholes(torch.float64, False), 0.5, 2.0))


@pytest.mark.meshes("dp=2", "dp=2,tp=2")
def test_sums_that_are_still_to_be_made_count_as_sums(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    ranks = worlds(mesh.size).run(clip_sums_on_rank, implementation, mesh, device)
    size = mesh.axes[0][1]
    assert_none(differences(ranks, [torch.full((2,), float(size))], 1e6, 2.0))


def test_without_a_gradient_the_norm_is_zero(implementation: Implementation, worlds: WorldsBySize) -> None:
    assert worlds(2).run(clip_nothing_on_rank, implementation) == [0.0, 0.0]


def sent_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> list[tuple[str, int]]:
    parameters = placed(mesh, wholes(torch.float32, True), device)
    with recorded() as sent:
        implementation.adapted(parameters, 1.0)
    return [(each.name, each.nbytes) for each in sent]


@pytest.mark.family("clipping", only=("by_axes",))
@pytest.mark.meshes("dp=2,tp=2", "dp=1,shard=2")
def test_one_all_reduce_for_each_axis(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """It has one number for each set of axes, whatever the parameters."""
    for found in worlds(mesh.size).run(sent_on_rank, implementation, mesh, device):
        assert len(found) == sum(size > 1 for _, size in mesh.axes)
        assert all(name == "all_reduce" and nbytes <= 4 * 2**2 for name, nbytes in found), found


def beyond_gradients_on_rank(implementation: Implementation, mesh: Mesh, model: str, device: str) -> int:
    """Bytes at the peak of a second clip beyond parameters and gradients."""
    case = ClippingCase(model, mesh=mesh.spec)
    own = ClippingStep(implementation, case, device).parameters
    state = sum(p.to_local().nbytes for p in own)  # type: ignore[attr-defined]
    del own
    return peak_of_a_step(ClippingStep, implementation, case) - 2 * state


@pytest.mark.family("clipping", only=("by_axes", "library"))
@pytest.mark.meshes("shard=2")
def test_memory_does_not_grow_with_the_gradients(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """A few numbers for each gradient, of tiny's 20 and of mini's 38, which are 13 times as large."""
    for model, count in (("tiny", 20), ("mini", 38)):
        found = worlds(mesh.size).run(beyond_gradients_on_rank, implementation, mesh, model, device)
        assert max(found) <= 64 * count, (model, found)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, 0.5, math.nan])
def test_what_is_no_norm_is_an_error(norm_type: float) -> None:
    for norm in (total_norm, gathered_norm):
        with pytest.raises(ValueError, match=f"type 1 or more, or infinity, not {norm_type}"):
            norm([torch.ones(2)], norm_type)
