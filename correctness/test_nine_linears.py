"""The closed forms of nine linears against the meter, in the stages of making a step and at its peak."""

from __future__ import annotations

from typing import Any

import pytest

from correctness.metering import assert_metered, measured
from impl.accounting.nine_linears import FSDP_PEAKS, activation_bytes, ddp_peak, linear_bytes, work
from perf.test_nine_linears import NineLinearsStep
from shardmark.cases import NineLinearsCase
from shardmark.registry import resolve

BATCHES = {"small_batch": 48, "large_batch": 384}
"""Rows of 96 values: where gradients decide on the peak, and where activations do."""


def held(family: str, name: str, case: NineLinearsCase) -> dict[str, int]:
    """Bytes on this rank at the peak, and after each stage."""
    memory = measured(NineLinearsStep, resolve(family, name), case).memory
    assert memory.stages["wrapping"].peak >= memory.stages["model"].live
    return {"peak": memory.peak} | {stage: at.live for stage, at in memory.stages.items()}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_ddps_bytes_are_the_formulas(batch: int, worlds: Any) -> None:
    case = NineLinearsCase(96, batch)
    data, model = activation_bytes(case), 9 * linear_bytes(case)
    expected = {
        "data": data,
        "model": data + model,
        "wrapping": data + 2 * model,  # with its buckets
        "warm-up": data + 3 * model + 4,  # with gradients and the loss
        "peak": ddp_peak(case),
    }
    assert_metered(worlds(2), [expected] * 2, held, "data_parallel", "ddp", case)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", FSDP_PEAKS)
def test_the_peak_of_sharding_is_within_a_fiftieth_of_the_formula(name: str, batch: int, worlds: Any) -> None:
    case = NineLinearsCase(96, batch)
    data, model = activation_bytes(case), 9 * linear_bytes(case)
    for rank in worlds(2).run(held, "fsdp", name, case):
        assert rank["peak"] == pytest.approx(FSDP_PEAKS[name](case), rel=0.02)
        assert rank["wrapping"] == pytest.approx(data + model / 2, rel=0.005)
        assert rank["warm-up"] == pytest.approx(data + model, rel=0.005)  # with gradients, sharded as it is


def test_work_is_that_of_three_products_a_linear() -> None:
    case = NineLinearsCase(width=10, batch=3, linears=2, ranks=4)
    assert work(case, gathered_again=False).flops == 4 * (2 * 3 * 10 * 10) * 5
    assert work(case, gathered_again=False).bytes_communicated == 2 * (2 * 4 * 110) * 3 // 4
    assert work(case, gathered_again=True).bytes_communicated == 3 * (2 * 4 * 110) * 3 // 4
