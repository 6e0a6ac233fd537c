"""The closed forms of nine linears against the meter, in the stages of making a step and at its peak."""

from __future__ import annotations

import pytest

from correctness.metering import assert_held
from impl.accounting.nine_linears import FSDP_PEAKS, activation_bytes, ddp_peak, linear_bytes, work
from perf.test_nine_linears import NineLinearsStep
from shardmark.cases import NineLinearsCase
from shardmark.passes import Measured, Plan, Rounds, measure
from shardmark.registry import resolve
from shardmark.world import World

PEAKS = {("data_parallel", "ddp"): ddp_peak, **{("fsdp", name): peak for name, peak in FSDP_PEAKS.items()}}
BATCHES = {"small_batch": 48, "large_batch": 384}
"""Rows of 96 values: where gradients decide on the peak, and where activations do."""


def _measured(world: World, family: str, name: str, case: NineLinearsCase) -> Measured:
    plan = Plan(NineLinearsStep, resolve(family, name), None, case, "cpu", world.size, Rounds(minimum=1, maximum=1))
    return max(world.run(measure, plan), key=lambda rank: rank.memory.peak)


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("family", "name"), PEAKS, ids=[name for _, name in PEAKS])
def test_the_peak_is_what_the_formula_says(family: str, name: str, batch: int, world: World, device: str) -> None:
    if device != "cpu":
        pytest.skip("CUDA's libraries keep workspaces of their own")
    case = NineLinearsCase(96, batch)
    memory = _measured(world, family, name, case).memory
    assert memory.peak == pytest.approx(PEAKS[family, name](case), rel=0.02)
    data, model = activation_bytes(case), 9 * linear_bytes(case)
    stages = {stage: held.live for stage, held in memory.stages.items()}
    assert stages["data"] == data and stages["model"] == data + model
    if family == "data_parallel":
        assert_held(memory.peak, ddp_peak(case))
        assert_held(stages["wrapping"], data + 2 * model)  # with its buckets
        assert_held(stages["warm-up"], data + 3 * model + 4)  # with gradients and the loss
    else:
        assert stages["wrapping"] == pytest.approx(data + model / 2, rel=0.005)
        assert stages["warm-up"] == pytest.approx(data + model, rel=0.005)  # with gradients, sharded as it is
    assert memory.stages["wrapping"].peak >= data + model and memory.stages["warm-up"].peak == memory.peak


def test_work_is_that_of_three_products_a_linear() -> None:
    case = NineLinearsCase(width=10, batch=3, linears=2, ranks=4)
    assert work(case, sharded=False).flops == 4 * (2 * 3 * 10 * 10) * 5
    assert work(case, sharded=False).bytes_communicated == 2 * (2 * 4 * 110) * 3 // 4
    assert work(case, sharded=True).bytes_communicated == 3 * (2 * 4 * 110) * 3 // 4
