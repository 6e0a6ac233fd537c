"""Nine linears by PyTorch's own and accelerate's sharding: predicted bytes against the meter."""

from dataclasses import replace
from typing import Any

import pytest

from correctness.fsdp.nine_linears import FEW, MANY, PREDICTED, assert_expected, expected_of
from impl.fsdp.cases import WRAPS


@pytest.mark.parametrize("case", [FEW, MANY, replace(FEW, width=49, ranks=3)], ids=["few", "many", "uneven_rows"])
@pytest.mark.parametrize("name", PREDICTED)
def test_bytes_are_those_predicted(name: str, case: Any, worlds: Any) -> None:
    assert_expected(worlds, name, case)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_with_every_wrap_on_every_number_of_ranks(name: str, wrap: str, ranks: int, worlds: Any) -> None:
    assert_expected(worlds, name, replace(FEW, wrap=wrap, ranks=ranks))


def test_fsdp2_counts_no_padding_of_gradients_where_all_linears_are_one_unit(worlds: Any) -> None:
    """Padded gradients live within one operator, so the meter counts them as workspace."""
    assert_expected(worlds, "fsdp2", replace(FEW, width=49, wrap="whole", ranks=3))


@pytest.mark.parametrize(
    ("name", "wrap"), [("ddp", WRAPS[0]), *((name, wrap) for name in PREDICTED[1:] for wrap in WRAPS)]
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
