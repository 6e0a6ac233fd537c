"""The closed forms of full sharding against the meter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from correctness.metering import measured
from impl.accounting.fsdp import sharded_peak, work
from impl.model.sizes import SIZES
from perf.test_fsdp import FSDPStep
from shardmark.cases import FSDPCase
from shardmark.registry import Implementation, family


def peak(implementation: Implementation, case: FSDPCase) -> int:
    """Of the third step."""
    return measured(FSDPStep, implementation, case, case.ranks).memory.peak


MINI = FSDPCase("mini", batch=2, context=64)
"""Parameters weigh more than activations."""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("sharded", MINI),
        ("sharded_plain", MINI),
        ("sharded_kept", MINI),
        ("sharded", replace(MINI, dtype="bfloat16")),
        ("sharded", FSDPCase("tiny", batch=4, context=256)),  # the largest moment is the loss
        ("sharded", replace(MINI, ranks=3)),  # the table does not divide by the ranks
    ],
    ids=lambda value: f"{value}-{value.ranks}ranks" if isinstance(value, FSDPCase) else value,
)
def test_peak_is_within_a_fiftieth_of_the_formula(name: str, case: FSDPCase, worlds: Any) -> None:
    implementation = family("fsdp").implementations[name]
    assert implementation.memory is not None
    for found in worlds(case.ranks).run(peak, implementation, case):
        assert found == pytest.approx(implementation.memory(case), rel=0.02)


def test_peak_falls_with_the_ranks_and_stays_above_what_every_rank_must_hold() -> None:
    peaks = [sharded_peak(FSDPCase("small", batch=1, context=128, ranks=ranks)) for ranks in (1, 2, 4, 8, 512)]
    assert peaks == sorted(peaks, reverse=True)
    two_tables = 2 * 4 * SIZES["small"].vocab * SIZES["small"].d_model
    assert two_tables < peaks[-1] < 0.5 * peaks[0]


def test_bytes_sent_are_those_of_gathering_twice_and_reducing_once() -> None:
    size = SIZES["mini"]
    table, whole = size.vocab * size.d_model, size.parameters
    for ranks in (1, 2, 4):
        case = FSDPCase("mini", batch=1, context=8, ranks=ranks)
        read_again = whole - table - size.d_model  # not the embedding's, nor the final norm's, which stays
        assert work(case).bytes_communicated == 4 * (2 * whole + read_again) * (ranks - 1) // ranks
        assert work(case, kept=True).bytes_communicated == 4 * 2 * whole * (ranks - 1) // ranks
