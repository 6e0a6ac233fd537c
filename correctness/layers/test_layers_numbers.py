"""Layers of large, small, zero and non-finite numbers, of many rows, and under autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from correctness.layers.accuracy import assert_as_accurate_as_eager
from correctness.layers.operations import call, random_inputs, results
from correctness.support.contracts import assert_near
from impl.layers import OPERATIONS, EagerLayers
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("layers"), pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EACH = pytest.mark.parametrize("operation", OPERATIONS)
NORMS = pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm"])


@NORMS
@pytest.mark.parametrize("size", [300.0, 15_000.0], ids=str)
def test_squares_may_overflow_float16(implementation: Implementation, size: float, operation: str, device: str) -> None:
    """The square of 300 is more than float16 holds, and so is the sum of smaller ones."""
    inputs = random_inputs(operation, 5, 200, device, torch.float16)
    large = {name: x if name == "weight" else (x.clamp(-2, 2) + 1).mul(size / 3) for name, x in inputs.tensors.items()}
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, tensors=large))


@pytest.mark.should("gradients in float16 are finite where eager's are")
@NORMS
def test_gradients_times_weight_may_overflow_float16(
    implementation: Implementation, operation: str, device: str
) -> None:
    """As under a loss scale: the product is in float32, and the gradients of x are small again."""
    inputs = random_inputs(operation, 2, 48, device, torch.float16)
    large = {name: torch.full_like(x, 8) if name == "weight" else 100 * x.sign() for name, x in inputs.tensors.items()}
    if "residual" in large:
        large["residual"] /= 2
    grads = inputs.grads | {"normed": 15_000 * inputs.grads["normed"].sign()}
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, tensors=large, grads=grads))


@NORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros_is_normed_to_zeros(
    implementation: Implementation, dtype: torch.dtype, operation: str, device: str
) -> None:
    """As padding's: its gradient is large, and finite."""
    inputs = random_inputs(operation, 4, 16, device, dtype)
    for name in inputs.tensors.keys() - {"weight"}:
        inputs.tensors[name][1] = 0
    found = results(implementation.watched, inputs)
    assert (found["normed"][1] == 0).all(), f"zeros are normed to {found['normed'][1, :3].tolist()}"
    assert_as_accurate_as_eager(implementation.watched, inputs)


@NORMS
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5, 1e-2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_is_added_to_the_mean_of_the_squares(
    implementation: Implementation, dtype: torch.dtype, eps: float, operation: str, device: str
) -> None:
    """Numbers as small as the root of eps, so that another eps, or one added to the root, is another result."""
    inputs, root = random_inputs(operation, 6, 32, device, dtype), max(eps, 1e-8) ** 0.5
    small = {name: x if name == "weight" else (x.double() * root).to(dtype) for name, x in inputs.tensors.items()}
    grads = {name: x * root for name, x in inputs.grads.items()}  # float16 could not hold gradients of x
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, tensors=small, grads=grads, eps=eps))


@NORMS
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(300, torch.bfloat16), *(pytest.param(60_000, dtype, marks=pytest.mark.large) for dtype in DTYPES[1:])],
)
def test_weights_gradient_is_summed_in_float32_over_many_rows(
    implementation: Implementation, rows: int, dtype: torch.dtype, operation: str, device: str
) -> None:
    """Each row adds nearly 1, which half precision no longer adds to 256 (bfloat16) or to 2,048 (float16)."""
    inputs = random_inputs(operation, rows, 4, device, dtype)
    ones = {name: torch.ones_like(x) for name, x in inputs.tensors.items()}
    grads = {name: torch.ones_like(x) if name == "normed" else torch.zeros_like(x) for name, x in inputs.grads.items()}
    found = results(implementation.watched, replace(inputs, tensors=ones, grads=grads))["grad_weight"]
    share = 1e-4 + torch.finfo(dtype).eps
    assert_near(
        {"grad_weight": found}, {"grad_weight": torch.full_like(found, rows).double()}, f"of {rows:,} rows", share
    )


@NORMS
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_sums_over_a_row_are_in_float32(
    implementation: Implementation, dtype: torch.dtype, operation: str, device: str
) -> None:
    """A row of 3,000 equal numbers: in half precision the sum of their squares stops growing."""
    inputs = random_inputs(operation, 3, 3000, device, dtype)
    equal = {name: x if name == "weight" else torch.full_like(x, 1.25) for name, x in inputs.tensors.items()}
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, tensors=equal))


@NORMS
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_have_no_part_along_their_rows(
    implementation: Implementation, dtype: torch.dtype, operation: str, device: str
) -> None:
    """A norm does not depend on its row's length, so the sum of grad_x * x is 0. Roundings of elements cancel in that
    sum, and those of the root do not."""
    rows, dim = 16, 2048
    inputs = random_inputs(operation, rows, dim, device, dtype)
    x = inputs.tensors["x"]
    tensors = {
        name: torch.ones_like(t) if name == "weight" else torch.zeros_like(t) for name, t in inputs.tensors.items()
    }
    grads = {name: torch.zeros_like(t) for name, t in inputs.grads.items()} | {"normed": x.clone()}
    found = results(implementation.watched, replace(inputs, tensors=tensors | {"x": x}, grads=grads, eps=1e-12))
    along = (found["grad_x"].double() * x.double()).sum(-1) / x.double().square().sum(-1)
    allowed = 8 * torch.finfo(dtype).eps / dim**0.5 + dim * torch.finfo(torch.float32).eps
    worst = along.abs().max().item()
    assert worst <= allowed, f"a row's gradient, which is x, leaves {worst:.2g} of it in the gradient of x, not 0"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [20.0, 100.0, 1000.0], ids=str)
def test_swiglu_of_large_numbers_does_not_overflow(
    implementation: Implementation, size: float, dtype: torch.dtype, device: str
) -> None:
    """The exponential of 100 overflows float32, and that of 20 float16."""
    inputs = random_inputs("swiglu", 6, 40, device, dtype)
    inputs.tensors["gate"].mul_(size)
    assert_as_accurate_as_eager(implementation.watched, inputs)


@EACH
def test_a_nan_stays_in_its_row(implementation: Implementation, operation: str, device: str) -> None:
    """It makes what depends on it NaN, and nothing else: 0 times NaN is NaN, also in a padded column."""
    inputs = random_inputs(operation, 9, 12, device)
    clean = call(implementation.watched, inputs)
    first, *_ = inputs.tensors.values()
    first[..., 4, 5] = float("nan")
    name, found = next(iter(call(implementation.watched, inputs).items()))
    of_row, others = found[..., 4, :], [*range(4), *range(5, 9)]
    assert of_row.isnan().any(dim=-1).all(), f"with a NaN in a row {name} is {of_row.flatten()[:3].tolist()}"
    assert torch.equal(found[..., others, :], clean[name][..., others, :]), (
        f"a NaN in one row changes other rows of {name}"
    )


@EACH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 60_000.0], ids=str)
def test_what_is_not_finite_in_a_results_gradient_is_not_hidden(
    implementation: Implementation, value: float, operation: str, device: str
) -> None:
    """A loss scaler looks for it in the gradients; 60,000 times 2, or three of them, are more than float16 holds."""
    inputs = random_inputs(operation, 9, 12, device, torch.float16 if value == 60_000.0 else torch.float32)
    for grad in inputs.grads.values():
        grad[..., 3:6, :] = value
    found, eager = (results(layers, inputs) for layers in (implementation.watched, EagerLayers))
    for name, x in found.items():
        assert eager[name].isfinite().all() or not x.isfinite().all(), (
            f"results' gradients of {value} in three rows give finite numbers in {name}"
        )


@EACH
@pytest.mark.parametrize(
    ("dtype", "to"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float16, torch.float16)]
)
def test_autocast_changes_nothing(
    implementation: Implementation, dtype: torch.dtype, to: torch.dtype, operation: str, device: str
) -> None:
    """Autocast is for matrix products: its dtype is that of no layer, and of no statistic."""
    inputs = random_inputs(operation, 7, 24, device, dtype)
    with torch.autocast(device, dtype=to):
        assert_as_accurate_as_eager(implementation.watched, inputs, when=f"under autocast to {to}: ")
