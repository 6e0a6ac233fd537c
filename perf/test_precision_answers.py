"""What does half precision lose, and where does autocast use it? Held to arithmetic bit by bit, and to steps."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from perf import precision_answers
from perf.part import asks
from perf.precision_answers import HUNDREDTHS, THOUSANDTHS, Sum, Toy, dtypes_of_a_step
from perf.published import rows_of

SUMS, AUTOCAST = map(asks, precision_answers.parts())
DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a number, the leading one included."""


def rounded(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The nearest number of that dtype, of two the one whose last digit is even; for numbers that are not tiny."""
    if not value:
        return value
    exponent = math.frexp(value)[1] - DIGITS[dtype]
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit  # round() halves to even


@SUMS
@pytest.mark.parametrize("each", [*HUNDREDTHS, *THOUSANDTHS], ids=lambda each: f"{each.number:g} {each.way}")
def test_a_sum_is_that_of_exact_fractions_rounded_at_each_addition(each: Sum) -> None:
    addend, total = rounded(Fraction(each.number), each.added), Fraction(0)
    for _ in range(each.times):
        total = rounded(total + addend, each.sum)
    assert each.found() == total


@SUMS
def test_the_sums_are_the_published_ones_to_the_last_digit() -> None:
    found = {f"{each.number:g}, {each.way}": each.found() for each in (*HUNDREDTHS, *THOUSANDTHS)}
    theirs = {}
    for row in rows_of("cs336_a100"):
        experiment, number, *_ = f"{row['experiment']} ".split(" ")
        if experiment == "accumulating":
            total, _, addend = row["case"].partition(" += ")
            way = f"{total} += {(addend or total).replace('.float()', ' as float32')}"
            theirs[f"{number}, {way}"] = float(row["value"])
    assert theirs == found


@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_cuda_layer_norm_and_loss_are_in_float32(dtype: torch.dtype) -> None:
    """As the write-up has it for its toy model."""
    found = dtypes_of_a_step(dtype, of_cuda=True)
    half = {name for name, each in found.items() if each == dtype}
    assert half == {"output of the first linear", "output of ReLU", "logits", "log-probabilities in the loss"}
    assert set(found.values()) == {dtype, torch.float32}


@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_cpu_layer_norm_is_in_half_precision(dtype: torch.dtype) -> None:
    found = dtypes_of_a_step(dtype, of_cuda=False)
    single = {name for name, each in found.items() if each != dtype}
    assert single == {"parameters", "log-probabilities in the loss", "loss", "gradients of parameters"}


@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cudas_lists_are_those_of_cuda_itself(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA here")
    model, seen = Toy().cuda(), {}
    with torch.autocast("cuda", dtype=dtype):
        model(torch.randn(4, 20, device="cuda"), seen)
    predicted = dtypes_of_a_step(dtype, of_cuda=True)
    assert {name: tensor.dtype for name, tensor in seen.items()} == {name: predicted[name] for name in seen}


@SUMS
def test_the_document_is_what_the_code_says() -> None:
    """To regenerate it: python -m perf.precision_answers > docs/precision-answers.md"""
    document = Path(__file__).parents[1] / "docs" / "precision-answers.md"
    assert document.read_text(encoding="utf-8") == precision_answers.document()
