"""Nine linears: closed forms and predictions against the meter, at each stage of setup and at the peak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from correctness.support.metering import UNSEEN, assert_metered, metered
from impl.accounting.ledger import explain
from impl.fsdp.cases import WRAPS, NineLinearsCase
from impl.fsdp.nine_linears_accounting import STRATEGIES, peak, stages, work
from impl.fsdp.nine_linears_workload import NineLinearsStep
from shardmark.api import INPUTS, Implementation, family, resolve
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.predict import predict
from shardmark.ranks.world import RankError

FEW, MANY = (NineLinearsCase(48, batch, linears=6) for batch in (24, 192))
"""Gradients decide the first case's peak, activations the second's."""
OWN = ("sharded", "sharded_plain", "sharded_kept")
PREDICTED = ["ddp", *(name for name, each in family("fsdp").implementations.items() if each.memory is None)]


def implementation_of(name: str) -> Implementation:
    return resolve("data_parallel" if name == "ddp" else "fsdp", name)


def held(name: str, case: NineLinearsCase) -> dict[str, int]:
    """Bytes on this rank at the peak of a step, and after each stage of setup."""
    memory = metered(NineLinearsStep, implementation_of(name), case, case.ranks)
    return {"peak": memory.tensors} | {stage: at.live for stage, at in memory.stages.items()}


def expected_of(name: str, case: NineLinearsCase) -> dict[str, int]:
    """Expected bytes: by formula if the implementation has one, else by prediction."""
    if reason := implementation_of(name).unavailable_reason("cpu", to_measure=True):
        pytest.skip(f"{name}: {reason}")
    if name in STRATEGIES:
        return stages(case, name) | {"peak": peak(case, name)}
    memory = predict(Plan(NineLinearsStep, implementation_of(name), None, case, "cpu", case.ranks)).memory
    return {"peak": memory.tensors} | {stage: at.live for stage, at in memory.stages.items()}


def assert_expected(worlds: Any, name: str, case: NineLinearsCase) -> None:
    """Compare on every rank. Uneven rows: on rank 0 alone, which has the most, and within the size of a few scalars."""
    expected = expected_of(name, case)
    uneven = case.width % case.ranks > 0
    alike, below = (1, UNSEEN) if uneven else (case.ranks, 0.0)
    assert_metered(worlds(case.ranks), [expected] * alike, held, name, case, below=below)


@pytest.mark.parametrize("name", [*STRATEGIES, *PREDICTED])
def test_bytes_are_the_formulas_or_predicted(name: str, worlds: Any) -> None:
    assert_expected(worlds, name, FEW)


@pytest.mark.parametrize("name", [*OWN, *PREDICTED])
def test_where_activations_decide(name: str, worlds: Any) -> None:
    assert_expected(worlds, name, MANY)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", [*OWN, "fsdp1", "fsdp2"])
def test_with_every_wrap_on_every_number_of_ranks(name: str, wrap: str, ranks: int, worlds: Any) -> None:
    assert_expected(worlds, name, replace(FEW, wrap=wrap, ranks=ranks))


@pytest.mark.parametrize("ranks", [1, 3])
def test_simple_fsdp_on_other_numbers_of_ranks(ranks: int, worlds: Any) -> None:
    assert_expected(worlds, "simple", replace(FEW, ranks=ranks))


@pytest.mark.parametrize("name", [*OWN, *PREDICTED, "simple"])
def test_where_rows_do_not_divide_by_the_ranks(name: str, worlds: Any) -> None:
    assert_expected(worlds, name, replace(FEW, width=49, ranks=3))


def test_fsdp2_counts_no_padding_of_gradients_where_all_linears_are_one_unit(worlds: Any) -> None:
    """Padded gradients live within one operator, so the meter counts them as workspace."""
    assert_expected(worlds, "fsdp2", replace(FEW, width=49, wrap="whole", ranks=3))


@pytest.mark.parametrize("name", OWN)
def test_the_peak_is_explained_by_named_entries(name: str) -> None:
    implementation = replace(implementation_of(name), memory=partial(peak, name=name))
    entries = explain(implementation, FEW).entries
    assert {"shard of parameters", INPUTS} <= entries.keys()
    assert entries[INPUTS] == 2 * 4 * FEW.batch * FEW.width


@pytest.mark.parametrize(
    ("name", "wrap"),
    [("ddp", WRAPS[0]), *((name, wrap) for name in [*STRATEGIES, *PREDICTED] if name != "ddp" for wrap in WRAPS)],
)
def test_a_step_leaves_parameters_and_gradients_alone(name: str, wrap: str) -> None:
    case = replace(FEW, wrap=wrap)
    after = expected_of(name, case)
    parameters = case.linears * 4 * (case.width**2 + case.width)
    made = after["wrapping"] - after["data"]
    of_each = {"ddp": parameters}.get(name, parameters // case.ranks)
    # the rank numbers that a mesh stores
    extra = 4 * case.ranks if name in ("fsdp2", "fsdp2_kept", "accelerate") else 0
    assert made == extra + (2 if name == "ddp" else 1) * of_each
    assert after["warm-up"] - after["wrapping"] == of_each


def offloaded(name: str) -> None:
    NineLinearsStep(resolve("fsdp", name), replace(FEW, offload=True), "cpu")


def test_offloading_from_a_cpu_costs_nothing_or_is_refused(worlds: Any) -> None:
    for name in ("sharded", "fsdp2"):
        assert_expected(worlds, name, replace(FEW, offload=True))
    with pytest.raises(RankError, match="Unsupported: FSDP1 offloads to the CPU only from an accelerator"):
        worlds(2).run(offloaded, "fsdp1")


@pytest.mark.parametrize("name", OWN)
def test_offloading_from_a_gpu_takes_shards_and_their_gradients_off_it(name: str) -> None:
    """The GPU still holds one unit's shards and gradients while they are copied."""
    case = replace(FEW, offload=True)
    shards = stages(case, name)["wrapping"] - stages(case, name)["data"]
    saved = peak(case, name) - peak(case, name, device="cuda")
    assert shards < saved < 2 * shards
    assert peak(case, name) == peak(FEW, name)


def test_work_is_that_of_three_products_a_linear() -> None:
    case = NineLinearsCase(width=10, batch=3, linears=2, ranks=4)
    assert work(case, gathered_again=0).flops == 4 * (2 * 3 * 10 * 10) * 5
    for again in range(3):
        assert work(case, gathered_again=again).bytes_communicated == (4 + again) * (4 * 110) * 3 // 4
