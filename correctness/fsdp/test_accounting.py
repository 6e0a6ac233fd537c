"""Closed forms of full sharding against the meter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from correctness.support.metering import assert_metered, peak_of_a_step
from impl.fsdp.accounting import sharded_peak, work
from impl.fsdp.cases import FSDPCase
from impl.fsdp.simple_accounting import transformer_peak
from impl.fsdp.workload import FSDPStep
from impl.model.sizes import SIZES
from impl.training_step.accounting import eager_peak
from impl.training_step.cases import TrainingStepCase
from shardmark.api import family
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.predict import predict

TINY = FSDPCase("tiny", batch=2, context=32)
"""Peak in backward, at the output projection or the last block."""
MANY_TOKENS = replace(TINY, batch=4, context=256)
"""Peak at the loss."""
FEW_TOKENS = replace(TINY, batch=1, context=8)
"""Parameters are larger than activations."""
MINI, WIDE = FSDPCase("mini", batch=2, context=64), FSDPCase("wide", batch=8, context=32)

OWN = ("sharded", "sharded_plain", "sharded_kept", "sharded_norms_replicated")
ALL = (*OWN, "simple")


def test_what_is_written_here_has_a_formula_of_its_own() -> None:
    assert set(ALL) == {name for name, each in family("fsdp").implementations.items() if each.memory is not None}


def predicted(name: str, case: FSDPCase) -> int:
    return predict(Plan(FSDPStep, family("fsdp").implementations[name], None, case, "cpu", case.ranks)).memory.tensors


LARGE = ("mini", "wide", "small", "medium", "large", "xl")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("model", ["tiny", *(pytest.param(model, marks=pytest.mark.sweep) for model in LARGE)])
def test_ours_needs_no_more_than_fsdp2_on_two_ranks(model: str, dtype: str) -> None:
    """One exception: with few tokens in wide blocks the peak is between blocks, where ours has three gathered."""
    for batch, context in ((1, 32), (4, 64), (4, 512)):
        case = FSDPCase(model, batch, context, dtype)
        exception = case == FSDPCase("wide", 1, 32)
        assert formula("sharded", case) <= (1.025 if exception else 1.001) * predicted("fsdp2", case)
        assert formula("sharded_kept", case) <= 1.001 * predicted("fsdp2_kept", case)


def peak(name: str, case: FSDPCase) -> dict[str, int]:
    """Peak bytes of a step on this rank."""
    return {name: peak_of_a_step(FSDPStep, family("fsdp").implementations[name], case)}


def formula(name: str, case: FSDPCase, device: str = "cpu") -> int:
    return family("fsdp").implementations[name].peak(case, device)


def named(value: Any) -> str:
    if isinstance(value, FSDPCase):
        return f"{value}-{value.ranks}ranks"
    return value[0] if len(value) == 1 else f"{len(value)}_implementations"


EVERY_TIME = [
    (("sharded",), replace(TINY, ranks=1)),
    (ALL, TINY),
    (("sharded",), replace(TINY, ranks=3)),  # three ranks divide neither the table's rows nor a block's
    (("sharded",), MANY_TOKENS),
    (("sharded_plain",), FEW_TOKENS),  # at the peak a block is all-gathered while the block after it is still gathered
    (("sharded_norms_replicated",), replace(TINY, ranks=3)),
    (("sharded",), replace(MINI, dtype="bfloat16")),  # workspace is a larger share of a smaller peak
]
SWEEP = [
    *((("simple",), replace(case, ranks=ranks)) for case in (TINY, FEW_TOKENS, MINI, WIDE) for ranks in (1, 2, 3, 4)),
    *((ALL, case) for case in (MINI, replace(MINI, ranks=3), MANY_TOKENS)),
    *((("sharded", "simple"), replace(MINI, ranks=ranks, dtype="bfloat16")) for ranks in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("names", "case"),
    [*EVERY_TIME, *(pytest.param(*values, marks=pytest.mark.sweep) for values in SWEEP if values not in EVERY_TIME)],
    ids=named,
)
def test_peaks_are_within_a_fiftieth_of_their_formulas_on_every_rank(
    names: Sequence[str], case: FSDPCase, worlds: Any, device: str
) -> None:
    for name in names:
        if reason := family("fsdp").implementations[name].unavailable_reason(device, to_measure=True):
            pytest.skip(f"{name}: {reason}")
        expected = case.ranks * [{name: formula(name, case, device)}]
        assert_metered(worlds(case.ranks), expected, peak, name, case, below=0.02)


@pytest.mark.parametrize("case", [TINY, MANY_TOKENS, FEW_TOKENS, MINI, WIDE], ids=str)
def test_the_ledger_of_one_rank_is_the_training_steps_closed_form_to_the_byte(case: FSDPCase) -> None:
    alone = TrainingStepCase(case.model, case.batch, case.context)
    assert transformer_peak(replace(case, ranks=1)) == eager_peak(alone)


def test_peak_falls_with_the_ranks_and_stays_above_what_every_rank_must_hold() -> None:
    peaks = [sharded_peak(FSDPCase("small", batch=1, context=128, ranks=ranks)) for ranks in (1, 2, 4, 8, 512)]
    assert peaks == sorted(peaks, reverse=True)
    two_tables = 2 * 4 * SIZES["small"].vocab * SIZES["small"].d_model
    assert two_tables < peaks[-1] < 0.5 * peaks[0]


@pytest.mark.parametrize("ranks", [100, pytest.param(1024, marks=pytest.mark.sweep)])
def test_simple_fsdp_pads_the_shards_of_all_ranks_that_have_fewer_rows(ranks: int) -> None:
    """With 100 ranks some have fewer rows of a block's parameters; with 1,024 most have none."""
    case = replace(TINY, ranks=ranks)
    mesh = 4 * ranks  # the rank numbers that a process's first mesh stores
    assert 0 <= predicted("simple", case) - transformer_peak(case) <= mesh


def test_bytes_sent_are_those_of_gathering_twice_and_reducing_once() -> None:
    size = SIZES["mini"]
    table, whole = size.vocab * size.d_model, size.parameters
    for ranks in (1, 2, 4):
        case = FSDPCase("mini", batch=1, context=8, ranks=ranks)
        read_again = whole - table - size.d_model  # the embedding and the final norm are not gathered again
        assert work(case).bytes_communicated == 4 * (2 * whole + read_again) * (ranks - 1) // ranks
        assert work(case, kept=True).bytes_communicated == 4 * 2 * whole * (ranks - 1) // ranks
        in_blocks = 2 * size.layers * size.d_model  # gradients of norms are all-reduced once
        norms_replicated = work(case, norms_replicated=True).bytes_communicated
        assert norms_replicated == 4 * (2 * whole + read_again - in_blocks) * (ranks - 1) // ranks
