"""The loss of large logits and non-finite numbers, under autocast, and with a gradient scaler."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from correctness.loss.accuracy import HALF_LOSS, Inputs, assert_as_accurate_as_eager, random_inputs, results, rounding
from correctness.support.contracts import Note, assert_near, is_ours
from correctness.support.default_dtype import OTHERS, default_dtype
from impl.loss import eager_loss, linear_cross_entropy
from shardmark.api import Implementation, family

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

WIDE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)

SUMS_IN_HALF = "PyTorch's own sums the loss of half precision in half precision"


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 1000.0), (torch.float32, 1000.0), (torch.bfloat16, 1e5)], ids=str
)
def test_large_logits_do_not_overflow(
    implementation: Implementation, dtype: torch.dtype, size: float, device: str
) -> None:
    """Exponentials of large logits overflow unless the row's maximum is subtracted first. float16 cannot hold
    those of bfloat16."""
    inputs = random_inputs(40, 16, 31, device, dtype)
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, hidden=size * inputs.hidden))


@WIDE
@pytest.mark.parametrize("added", [-1e5, -1000.0, 1000.0], ids=str)
def test_what_is_added_to_every_logit_changes_nothing(
    implementation: Implementation, added: float, dtype: torch.dtype, device: str
) -> None:
    """Logits all far below zero: a running maximum that starts at zero would underflow every term."""
    inputs = random_inputs(40, 16, 31, device, dtype)
    inputs.hidden[:, 0], inputs.weight[:, 0] = 100.0, added / 100
    assert_as_accurate_as_eager(implementation.watched, inputs)


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float32, -3e38), (torch.float16, -3e4)], ids=str)
def test_a_logit_of_minus_infinity_adds_nothing(
    implementation: Implementation,
    dtype: torch.dtype,
    lowest: float,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """The product overflows in that dtype: all is as without the word. 0 times the logit would be NaN."""
    inputs = random_inputs(40, 16, 31, device, dtype)
    inputs.targets[inputs.targets == 0] = 1
    inputs.hidden[:, 0], inputs.weight[:, 0], inputs.weight[0, 0] = 4.0, 0.0, lowest
    # On a CPU it sums float16 in float32, which holds that logit.
    if implementation.spec == "linear_cross_entropy" and (device, dtype) == ("cpu", torch.float32):
        why = "an ignored target's loss is that of word 0, times 0: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    found, share = results(implementation.watched, inputs), 1e-5 if dtype == torch.float32 else 0.02
    others = replace(
        inputs, weight=inputs.weight[1:], targets=torch.where(inputs.targets < 0, -100, inputs.targets - 1)
    )
    wanted = results(eager_loss, others.to(torch.float64))
    wanted["grad_weight"] = pad(wanted["grad_weight"], (0, 0, 1, 0))
    assert_near(found, wanted, f"with a logit of {4 * lowest:g} for the first word", share)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("offset", [-(2.0**18), 2.0**18], ids=str)
def test_an_offset_that_all_logits_share_costs_no_digits(
    implementation: Implementation, offset: float, options: dict[str, float], device: str
) -> None:
    """Logits of quarters are exact in float32 beside the offset; a log-sum-exp there has lost its own digits."""
    hidden = torch.randint(-4, 5, (40, 16), device=device) / 2
    weight = torch.randint(-2, 3, (31, 16), device=device) / 2
    hidden[:, 0], weight[:, 0] = 1.0, offset
    inputs = Inputs(hidden, weight, torch.randint(31, (40,), device=device))
    found = results(implementation.watched, inputs, **options)
    wanted = results(eager_loss, inputs.to(torch.float64), **options)
    for each in (found, wanted):  # of the offset's own column it is a sum of large terms that cancel
        each["grad_hidden"] = each["grad_hidden"][:, 1:]
    assert_near(found, wanted, f"with {offset:g} added to every logit", share=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_half_precision_are_in_float32(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    """Logits near zero round by little; a log-sum-exp near 8 would round by much in half precision."""
    inputs = random_inputs(40, 16, 3000, device)
    inputs = replace(inputs, hidden=inputs.hidden / 64).to(dtype)
    assert_as_accurate_as_eager(implementation.watched, inputs)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"z_loss": 0.1}], ids=["plain", "smoothed", "z_loss"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_without_an_error_have_a_loss_of_float32(
    implementation: Implementation, dtype: torch.dtype, options: dict[str, float], device: str
) -> None:
    """Each token's logits are a column of the weight, and exact: another rounding after them shows, as of the logits
    less their largest."""
    if implementation.target is linear_cross_entropy:
        pytest.skip(SUMS_IN_HALF)
    inputs = random_inputs(40, 16, 300, device)
    hidden = torch.eye(16, device=device)[torch.arange(40, device=device) % 16]
    inputs = replace(inputs, hidden=hidden, weight=3 * inputs.weight).to(dtype)
    found = results(implementation.watched, inputs, **options)["loss"]
    wanted = results(eager_loss, inputs.to(torch.float64), **options)["loss"]
    assert_near({"loss": found}, {"loss": wanted}, "of logits that are exact", share=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [259, pytest.param(2051, marks=pytest.mark.large)])
def test_divides_by_the_exact_number_of_targets(
    implementation: Implementation, tokens: int, dtype: torch.dtype, device: str
) -> None:
    """Half precision may not represent that number. With logits of zero the loss is the logarithm of the vocabulary
    size."""
    if implementation.target is linear_cross_entropy:
        pytest.skip(SUMS_IN_HALF)
    inputs = random_inputs(tokens, 8, 11, device, dtype, ignored=None)
    loss = implementation.watched(torch.zeros_like(inputs.hidden), inputs.weight, inputs.targets).item()
    assert loss == pytest.approx(math.log(11), rel=1e-4), f"the mean over {tokens} targets"


@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_a_nan_makes_the_loss_nan(
    implementation: Implementation, where: str, device: str, record_property: Note
) -> None:
    inputs = random_inputs(40, 16, 31, device)
    getattr(inputs, where)[3, 5] = float("nan")
    found = results(implementation.watched, inputs)
    assert found["loss"].isnan(), f"with a NaN in {where} the loss is {found['loss']:.4g}"
    if not (found["grad_hidden"][3].isnan().all() and found["grad_weight"].isnan().any()):
        assert not is_ours(implementation), f"with a NaN in {where} the gradients are numbers"
        record_property("note", f"with a NaN in {where} its loss is NaN, and its gradients are numbers")


@pytest.mark.parametrize("times", [float("nan"), float("inf"), 2.0**30], ids=str)
def test_what_is_not_finite_in_the_losss_gradient_is_not_hidden(
    implementation: Implementation, times: float, device: str
) -> None:
    """A loss scaler looks for it in the gradients; float16 does not hold them 2**30 times as large."""
    inputs = random_inputs(40, 16, 31, device, torch.float16 if times == 2.0**30 else torch.float32)
    found = results(implementation.watched, replace(inputs, grad=times))
    for name in ("grad_hidden", "grad_weight"):
        assert not found[name].isfinite().all(), f"{name} is finite, where the loss's own gradient is {times}"


@pytest.mark.large
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"z_loss": 0.1}], ids=["plain", "smoothed", "z_loss"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nan_of_the_last_token_or_word_makes_the_loss_nan(
    implementation: Implementation, dtype: torch.dtype, options: dict[str, float], device: str
) -> None:
    """The last of 600 tokens and of 2,049 words are in a later chunk, block or program."""
    for where in ("hidden", "weight"):
        inputs = random_inputs(600, 8, 2049, device, dtype)
        getattr(inputs, where)[-1, 5] = float("nan")
        inputs.targets[-1] = 3
        loss = implementation.watched(inputs.hidden.requires_grad_(), inputs.weight, inputs.targets, **options)
        assert loss.isnan(), f"with a NaN in the last row of {where} the loss is {loss:.4g}"


AUTOCAST = {"float32": (torch.float32, torch.float32), "mixed": (None, torch.float32)}
"""Dtypes of hidden and weight; None stands for autocast's dtype."""
LARGE = 30_000.0
"""Times usual ones, logits are above float16's range and within that of bfloat16."""


@pytest.mark.parametrize(
    ("to", "size"),
    [
        pytest.param(torch.bfloat16, 1.0, id="torch.bfloat16"),
        pytest.param(torch.float16, 1.0, id="torch.float16"),
        pytest.param(torch.bfloat16, LARGE, id="large-torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("how", AUTOCAST)
def test_under_autocast_products_are_in_its_dtype_and_the_loss_is_not(
    implementation: Implementation, how: str, to: torch.dtype, size: float, device: str, record_property: Note
) -> None:
    """The reference is Linear and cross_entropy under autocast. `mixed`: hidden is in half precision already."""
    inputs = random_inputs(60, 32, 97, device)
    inputs = replace(inputs, hidden=size * inputs.hidden)
    dtypes = [to if dtype is None else dtype for dtype in AUTOCAST[how]]

    def under_autocast(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=to):
            return implementation.watched(hidden.to(dtypes[0]), weight.to(dtypes[1]), targets)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=to):
            logits = torch.nn.functional.linear(hidden.to(dtypes[0]), weight.to(dtypes[1]))
            assert logits.dtype == to
            return torch.nn.functional.cross_entropy(logits, targets)

    exact = results(eager_loss, inputs.to(torch.float64))
    found, wanted = results(under_autocast, inputs), results(plain, inputs)
    half = rounding(inputs.to(torch.float64), torch.finfo(to).eps, torch.finfo(torch.float32).eps, {})
    for name, x in found.items():
        right = x.dtype == torch.float32 or (name == "loss" and x.dtype == torch.float64)
        assert right, f"under autocast {name} is {x.dtype}, expected torch.float32"
        if name == "loss" and implementation.target is linear_cross_entropy:
            half[name] += HALF_LOSS * torch.finfo(to).eps * exact[name].abs().item()
        error, plain_error = ((y.double() - exact[name]).abs().max().item() for y in (x, wanted[name]))
        assert error <= 2 * max(plain_error, half[name]), f"{name}: {error:.2e} against {plain_error:.2e}"
    without = results(implementation.watched, inputs)
    single = rounding(inputs.to(torch.float64), torch.finfo(torch.float32).eps, torch.finfo(torch.float32).eps, {})
    if all((found[name] - without[name]).abs().max() <= single[name] for name in found):
        assert not is_ours(implementation)
        record_property(
            "note", "the loss under autocast is the same as without: products are in float32, which is slow"
        )


@pytest.mark.parametrize(("tokens", "vocab"), [(128, 1500), pytest.param(1024, 8000, marks=pytest.mark.large)])
def test_a_gradient_scaler_lifts_small_gradients_of_half_precision(
    implementation: Implementation, tokens: int, vocab: int, device: str
) -> None:
    """In a mean over many tokens each token's gradient is too small for float16, unless the loss is scaled. Words
    that are targets have the largest gradients, so the test compares the other words."""
    inputs = replace(random_inputs(tokens, 8, vocab, device, torch.float16, ignored=None), grad=2.0**16)
    inputs.targets.remainder_(100)
    exact = results(eager_loss, inputs.to(torch.float64))["grad_weight"][100:]
    found = results(implementation.watched, inputs)["grad_weight"].double()[100:]
    error = ((found - exact).norm() / exact.norm()).item()
    assert error <= 0.01, f"weight's gradient with a scale of 2^16: relative error {error:.4f}, allowed 0.01"


SCALES = {  # dtypes of the inputs and of autocast, and the factor of the sum's gradients
    "bfloat16": (torch.bfloat16, None, 1 / 7777),
    "float16": (torch.float16, None, 100_003.0),
    "autocast": (torch.float32, torch.bfloat16, 1 / 7777),
}


@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("name", ["fused_pytorch", "fused_triton"])
def test_the_scale_of_gradients_is_not_rounded_to_half_precision(name: str, how: str, device: str) -> None:
    """A scale rounded to bfloat16 would bias every gradient the same way; in float16 it would be infinite."""
    implementation = family("loss").implementations[name]
    if reason := implementation.unavailable_reason(device):
        pytest.skip(reason)
    dtype, product, scale = SCALES[how]
    inputs = random_inputs(16, 1024, 40, device, ignored=None)
    inputs = replace(inputs, hidden=2.0**6 * inputs.hidden, weight=2.0**-6 * inputs.weight).to(dtype)

    def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=product, enabled=product is not None):
            return implementation.watched(hidden, weight, targets)

    summed, found = (results(loss_of, replace(inputs, grad=16 * by))["grad_hidden"].double() for by in (1.0, scale))
    bias = ((found - scale * summed) * summed.sign()).sum() / (scale * summed).abs().sum()  # random errors cancel
    assert abs(bias.item()) < 2**-12, f"{bias.item() * 2**12:.2f} of 2^-12"


@pytest.mark.long
@pytest.mark.parametrize(
    "option", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}], ids=["plain", "smoothing", "z_loss"]
)
@pytest.mark.parametrize("default", OTHERS, ids=str)
def test_another_default_dtype_changes_nothing(
    implementation: Implementation, option: dict[str, float], default: torch.dtype, device: str
) -> None:
    """The option and the number of targets have more digits than a tensor of half precision."""
    inputs = random_inputs(1000, 24, 41, device)
    with default_dtype(default):
        assert_as_accurate_as_eager(implementation.watched, inputs, **option)
