"""Memory and communication of a step with a sharded optimizer: closed forms against the meter, on every rank."""

from dataclasses import replace
from typing import Any

import pytest

from correctness.support.metering import assert_metered, device_of_rank, metered, plan_of
from impl.model import SIZES
from impl.sharded_optimizer.accounting import sharded_bytes, sharded_peak, work, zero_redundancy_work
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from shardmark.api import family
from shardmark.meter.measure_case import meter_pass
from shardmark.rows.observers import timeline_pass

AT_LAYERS = ShardedStepCase("tiny", 2, 32)
"""A case that peaks in backward, at the output projection or in the last layer."""
AT_END, AT_LOSS = ShardedStepCase("mini", 1, 4), ShardedStepCase("tiny", 3, 61)
FEW_BUCKETS = replace(AT_END, bucket_mb=25)


def peak(name: str, case: ShardedStepCase) -> dict[str, int]:
    """Peak bytes of the third step on this rank."""
    implementation = family("sharded_optimizer").implementations[name]
    return {"peak": metered(ShardedStep, implementation, case, case.ranks).tensors}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("unsharded", AT_LAYERS),
        ("sharded", AT_END),
        ("sharded", AT_LOSS),
        ("sharded", replace(AT_LOSS, dtype="bfloat16")),
        ("sharded", FEW_BUCKETS),
    ],
    ids=str,
)
def test_peak_is_the_formulas_on_every_rank(name: str, case: ShardedStepCase, worlds: Any, device: str) -> None:
    expected = {"peak": family("sharded_optimizer").implementations[name].peak(case, device)}
    assert_metered(worlds(2), [expected] * 2, peak, name, case, below=0.005)


def test_buckets_are_of_5_mb_on_cpu_and_of_25_on_a_gpu() -> None:
    for device, bucket_mb in (("cpu", 5), ("cuda", 25)):
        assert sharded_peak(AT_END, device) == sharded_peak(replace(AT_END, bucket_mb=bucket_mb), device)
    assert sharded_peak(AT_END, "cuda") != sharded_peak(replace(AT_END, bucket_mb=5), "cuda")


def bytes_by_kind(case: ShardedStepCase) -> dict[str, int]:
    """Bytes on this rank at the end of each phase, and bytes of each kind at the start of a step."""
    implementation = family("sharded_optimizer").implementations["sharded"]
    plan = plan_of(ShardedStep, implementation, case, case.ranks, device=device_of_rank())
    kinds, (_, memory, _) = timeline_pass(plan).phases, meter_pass(plan)
    phases = {phase: memory.phases[phase] for phase in ("after_init", "before_step", "after_step")}
    after = kinds["after_optimizer"]
    after_optimizer = sum(after.values()) - after["temporaries"]  # without a backend's gather buffers
    at_end = {"after_optimizer": after_optimizer, "gradients after optimizer": after["gradients"]}
    return phases | kinds["before_step"] | at_end


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_bytes_of_each_kind_are_the_formulas_to_the_byte_on_every_rank(ranks: int, worlds: Any, device: str) -> None:
    case = replace(AT_LAYERS, ranks=ranks)
    expected = [
        {
            "after_init": held.after_init,
            "before_step": held.before_step,
            "after_step": held.before_step,
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer state": held.optimizer_state,
            "inputs and buffers": held.inputs_and_buffers + 4,  # the loss
            "after_optimizer": held.after_step,
            "gradients after optimizer": 0,
        }
        for held in (sharded_bytes(case, rank, device) for rank in range(ranks))
    ]
    assert_metered(worlds(ranks), expected, bytes_by_kind, case)


def test_shards_of_the_state_are_the_nth_part_and_a_number_for_each_parameter() -> None:
    case = ShardedStepCase("mini", 2, 64)
    elements, parameters = SIZES["mini"].parameters, 3 + 9 * SIZES["mini"].layers
    for ranks in (1, 2, 3, 8):
        for rank in range(ranks):
            state = sharded_bytes(replace(case, ranks=ranks), rank).optimizer_state
            assert 0 <= state - 8 * elements // ranks <= 4 * parameters + 8 * ranks * parameters


def test_a_step_sends_gradients_once_and_parameters_once() -> None:
    case = AT_LAYERS
    assert work(case).bytes_communicated == 4 * SIZES["tiny"].parameters  # 2 (n - 1) / n of them, each of 4 bytes
    assert zero_redundancy_work(case).bytes_communicated == 6 * SIZES["tiny"].parameters
