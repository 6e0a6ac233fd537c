"""The closed forms of nine linears against the meter, in the stages of making a step and at its peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from correctness.support.metering import UNSEEN, assert_metered, metered
from impl.accounting.library.nine_linears import SHARDINGS, peak, stages, work
from impl.fsdp.cases import WRAPS, NineLinearsCase
from perf.workloads.nine_linears import SHARDED, NineLinearsStep
from shardmark.registry import resolve
from shardmark.world import RankError

FEW, MANY = (NineLinearsCase(48, batch, linears=6) for batch in (24, 192))
"""Where gradients decide on the peak, and where activations do."""


def held(name: str, case: NineLinearsCase) -> dict[str, int]:
    """Bytes on this rank at the peak of a step, and after each stage of making it."""
    implementation = resolve("data_parallel" if name == "ddp" else "fsdp", name)
    memory = metered(NineLinearsStep, implementation, case, case.ranks)
    return {"peak": memory.tensors} | {stage: at.live for stage, at in memory.stages.items()}


def assert_formula(worlds: Any, name: str, case: NineLinearsCase) -> None:
    """On every rank; or where rows are uneven, but for scalars, on the first, which has the most."""
    if reason := resolve("data_parallel" if name == "ddp" else "fsdp", name).unavailable_reason("cpu", to_measure=True):
        pytest.skip(f"{name}: {reason}")
    expected = stages(case, SHARDINGS[name]) | {"peak": peak(case, SHARDINGS[name])}
    if name in ("fsdp2", "fsdp2_kept", "accelerate"):  # the mesh's number of each rank, from when it is wrapped
        expected |= {stage: expected[stage] + 4 * case.ranks for stage in ("wrapping", "warm-up")}
    uneven = case.width % case.ranks > 0
    alike, below = (1, UNSEEN) if uneven else (case.ranks, 0.0)
    assert_metered(worlds(case.ranks), [expected] * alike, held, name, case, below=below)


@pytest.mark.parametrize("name", SHARDINGS)
def test_bytes_are_the_formulas(name: str, worlds: Any) -> None:
    assert_formula(worlds, name, FEW)


@pytest.mark.parametrize("name", ["ddp", *SHARDED])
def test_where_activations_decide(name: str, worlds: Any) -> None:
    assert_formula(worlds, name, MANY)


@pytest.mark.parametrize("wrap", WRAPS[1:])
@pytest.mark.parametrize("name", SHARDED)
def test_with_more_in_a_unit(name: str, wrap: str, worlds: Any) -> None:
    assert_formula(worlds, name, replace(FEW, wrap=wrap))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [*SHARDED, "simple"])
def test_on_other_numbers_of_ranks(name: str, ranks: int, worlds: Any) -> None:
    assert_formula(worlds, name, replace(FEW, ranks=ranks))


@pytest.mark.parametrize("name", [*SHARDED, "simple"])
def test_where_rows_do_not_divide_by_the_ranks(name: str, worlds: Any) -> None:
    assert_formula(worlds, name, replace(FEW, width=49, ranks=3))


def offloaded(name: str) -> None:
    NineLinearsStep(resolve("fsdp", name), replace(FEW, offload=True), "cpu")


def test_offloading_from_a_cpu_costs_nothing_or_is_refused(worlds: Any) -> None:
    for name in ("sharded", "fsdp2"):
        assert_formula(worlds, name, replace(FEW, offload=True))
    with pytest.raises(RankError, match="Unsupported: FSDP1 offloads to the CPU only from an accelerator"):
        worlds(2).run(offloaded, "fsdp1")


@pytest.mark.parametrize("name", SHARDED)
def test_offloading_from_a_gpu_takes_shards_and_their_gradients_off_it(name: str) -> None:
    """But for a unit's, on their way."""
    case = replace(FEW, offload=True)
    sharding = SHARDINGS[name]
    shards = stages(case, sharding)["wrapping"] - stages(case, sharding)["data"]
    saved = peak(case, sharding) - peak(case, sharding, device="cuda")
    assert shards < saved < 2 * shards
    assert peak(case, sharding) == peak(FEW, sharding)


def test_work_is_that_of_three_products_a_linear() -> None:
    case = NineLinearsCase(width=10, batch=3, linears=2, ranks=4)
    assert work(case, gathered_again=0).flops == 4 * (2 * 3 * 10 * 10) * 5
    for again in range(3):
        assert work(case, gathered_again=again).bytes_communicated == (4 + again) * (4 * 110) * 3 // 4
