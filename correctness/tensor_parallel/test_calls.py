"""Calls of a parallel model: logits, gradients, bytes held and sent."""

from __future__ import annotations

import pytest

from correctness.support.complaints import assert_none
from correctness.tensor_parallel.calls import (
    BFLOAT16,
    WIDE,
    WIDES,
    bfloat16_in_one_process,
    bfloat16_on_rank,
    differences,
    logits_in_one_process,
    logits_on_rank,
    parts_on_rank,
    peak_with_targets_on_rank,
    rounding_differences,
    ruled_out_in_one_process,
    ruled_out_on_rank,
    two_calls_in_one_process,
    two_calls_on_rank,
)
from shardmark.api import Implementation, Mesh
from shardmark.plugin import WorldsBySize

pytestmark = pytest.mark.family("tensor_parallel")

CUT = ("attention.", "feed_forward.", "tok_embeddings.", "output.")


@pytest.mark.meshes("tp=2", "tp=3")
@pytest.mark.parametrize("kind", ["even", "sizes_that_do_not_divide", "few_kv_heads"])
def test_logits_are_whole_on_every_rank(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    """With tokens that do not lie one after the other, and gradients of logits that are expanded."""
    ranks = worlds(mesh.size).run(logits_on_rank, implementation, mesh, kind, device)
    assert_none(differences(ranks, logits_in_one_process(kind)))


@pytest.mark.long
@pytest.mark.meshes("tp=2")
@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late_collectives"])
def test_two_calls_before_their_backward_passes(
    implementation: Implementation, mesh: Mesh, late: bool, worlds: WorldsBySize, device: str
) -> None:
    ranks = worlds(mesh.size).run(two_calls_on_rank, implementation, mesh, device, late)
    assert_none(differences(ranks, two_calls_in_one_process()))


@pytest.mark.meshes("tp=2")
def test_logits_of_words_may_be_minus_infinity(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    ranks = worlds(mesh.size).run(ruled_out_on_rank, implementation, mesh, device)
    assert_none(differences(ranks, ruled_out_in_one_process()))


@pytest.mark.meshes("tp=2")
@pytest.mark.parametrize("how", BFLOAT16)
def test_bfloat16_is_as_near_as_in_one_process(
    implementation: Implementation, mesh: Mesh, how: str, worlds: WorldsBySize, device: str
) -> None:
    ranks = worlds(mesh.size).run(bfloat16_on_rank, implementation, mesh, how, device)
    assert_none(rounding_differences(ranks, *bfloat16_in_one_process(how)))


@pytest.mark.meshes("tp=2", "tp=3", "tp=4")
def test_each_rank_has_its_part_of_every_matrix(
    implementation: Implementation, mesh: Mesh, worlds: WorldsBySize, device: str
) -> None:
    """And no memory of the others', but that a smaller part may be padded to the size of the largest."""
    ranks = worlds(mesh.size).run(parts_on_rank, implementation, mesh, device)
    largest = {name: max(parts[name][1] for parts in ranks) for name in ranks[0]}
    for rank, parts in enumerate(ranks):
        for name, (every, own, kept) in parts.items():
            if name.startswith(CUT) or any(f".{part}" in name for part in CUT):
                assert own <= every * (1 / mesh.size + 0.05), f"rank {rank} has {own:,} of {every:,} values of {name}"
            assert own <= kept <= largest[name], (
                f"rank {rank} keeps {kept:,} values alive for the {own:,} that it has of {name}"
            )


@pytest.mark.meshes("tp=2", "tp=4")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "even" else pytest.mark.judged) for kind in WIDES]
)
def test_no_rank_has_the_whole_logits(
    implementation: Implementation, mesh: Mesh, kind: str, worlds: WorldsBySize, device: str
) -> None:
    """Forward and backward of the loss keep three copies of a rank's own columns at most: of the logits, of their
    exponentials, and of the gradient. Whole logits would be as many as there are ranks."""
    columns = 8 * 32 * WIDE.vocabulary * 4 // mesh.size
    weights = 3 * WIDE.vocabulary // mesh.size * WIDE.dim * 4
    for peaks in worlds(mesh.size).run(peak_with_targets_on_rank, implementation, mesh, kind, device):
        for of, found in peaks.items():
            times = f"{found / columns:.2f} times a rank's own logits"
            assert found < 3.2 * columns + weights, f"{found:,} bytes in {of}, {times}"
