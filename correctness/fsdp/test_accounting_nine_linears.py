"""Nine linears: closed forms against the meter, at each stage of setup and at the peak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from correctness.fsdp.nine_linears import FEW, MANY, OWN, assert_expected, expected_of, implementation_of
from impl.accounting.ledger import explain
from impl.fsdp.cases import WRAPS, NineLinearsCase
from impl.fsdp.nine_linears_accounting import STRATEGIES, peak, work
from shardmark.api import INPUTS


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", OWN)
def test_bytes_are_the_formulas(name: str, wrap: str, ranks: int, worlds: Any) -> None:
    assert_expected(worlds, name, replace(FEW, wrap=wrap, ranks=ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_of_simple_fsdp_are_the_formulas(ranks: int, worlds: Any) -> None:
    assert_expected(worlds, "simple", replace(FEW, ranks=ranks))


@pytest.mark.parametrize("name", OWN)
def test_where_activations_decide(name: str, worlds: Any) -> None:
    assert_expected(worlds, name, MANY)


@pytest.mark.parametrize("name", STRATEGIES)
def test_where_rows_do_not_divide_by_the_ranks(name: str, worlds: Any) -> None:
    assert_expected(worlds, name, replace(FEW, width=49, ranks=3))


@pytest.mark.parametrize("name", OWN)
def test_the_peak_is_explained_by_named_entries(name: str) -> None:
    implementation = replace(implementation_of(name), memory=partial(peak, name=name))
    entries = explain(implementation, FEW).entries
    assert {"shard of parameters", INPUTS} <= entries.keys()
    assert entries[INPUTS] == 2 * 4 * FEW.batch * FEW.width


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_leaves_parameters_and_gradients_alone(name: str, wrap: str) -> None:
    case = replace(FEW, wrap=wrap)
    after = expected_of(name, case)
    parameters = case.linears * 4 * (case.width**2 + case.width)
    assert after["wrapping"] - after["data"] == after["warm-up"] - after["wrapping"] == parameters // case.ranks


def test_work_is_that_of_three_products_a_linear() -> None:
    case = NineLinearsCase(width=10, batch=3, linears=2, ranks=4)
    assert work(case, gathered_again=0).flops == 4 * (2 * 3 * 10 * 10) * 5
    for again in range(3):
        assert work(case, gathered_again=again).bytes_communicated == (4 + again) * (4 * 110) * 3 // 4
