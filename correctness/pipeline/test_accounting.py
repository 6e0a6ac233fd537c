"""Bytes that a rank of a pipeline holds after each action are those of the closed form, on every stage."""

from __future__ import annotations

import pytest

from correctness.pipeline.metered import held_on_rank
from impl.pipeline import is_schedule, planned
from impl.pipeline.actions import plan_of
from impl.pipeline.cases import DecoderCase
from impl.pipeline.held import held_after, state
from shardmark.api import Implementation, NotAsked, family
from shardmark.plugin import WorldsBySize


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.sweep), pytest.param(4, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("of_each", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.family("pipeline")
def test_a_rank_holds_the_bytes_of_the_formula_after_each_action(
    implementation: Implementation, ranks: int, of_each: int, worlds: WorldsBySize, device: str
) -> None:
    """To the byte: micro-batches in flight, messages, and what zero bubble keeps for gradients of weights."""
    if not (is_schedule(implementation.target) and implementation.name in family("pipeline").implementations):
        raise NotAsked("the bytes of a decoder's stages are asked of the suite's own schedules")
    if device != "cpu":
        pytest.skip("the formula is of kernels on a CPU")
    case = DecoderCase("tiny-deep", of_each * ranks, rows=2, context=16, ranks=ranks)
    plan = planned(implementation.target, ranks, case.micro_batches)
    for rank, (before, found) in enumerate(worlds(ranks).run(held_on_rank, implementation, case, device)):
        assert before == state(case, plan, rank), f"rank {rank}, before the step"
        wrong = [
            f"rank {rank} holds {metered:,} bytes after {action}, and by the formula {held:,}: {held.entries}"
            for action, metered, held in zip(plan[rank], found, held_after(case, plan, rank), strict=True)
            if metered != held
        ]
        assert not wrong, wrong[0]


def test_zero_bubble_keeps_inputs_and_gradients_of_products_by_hand() -> None:
    """One layer of the tiny decoder, for 32 tokens: 3 * 48 + 192 of inputs, and of gradients 3 * 48 + 2 * 24 + 2 *
    192; and of the output's product 48 + 768."""
    plan = plan_of([["0F0", "0I0", "0W0"]])
    case = DecoderCase("tiny-deep", micro_batches=1, rows=2, context=16)
    (_, kept, after) = held_after(case, plan, 0)
    assert kept.entries["kept for gradients of weights"] == 4 * 32 * (8 * (336 + 576) + 816)
    assert "kept for gradients of weights" not in after.entries
