"""Every loss against float64: value and gradients, sizes, options, dtypes, bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.losses import HALF_LOSS, Inputs, assert_as_accurate_as_eager, random_inputs, results, rounding
from impl.loss import Loss, check_inputs, chunked, eager_loss, fused, fused_loss_pytorch, linear_cross_entropy
from shardmark.registry import Implementation, RegistryError, check_contract, family, resolve

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


SIZES = {  # tokens, dim, vocab
    "one_token": (1, 16, 33),
    "one_word": (5, 8, 1),
    "one_column": (7, 1, 97),
    "odd": (37, 29, 515),
    "chunk_and_one": (513, 24, 40),
    "several_chunks": (1200, 8, 12),
    "longer_than_a_block": (4, 8, 8200),
}

LARGE = ("chunk_and_one", "several_chunks")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 1e-2},
    "everything": {"label_smoothing": 0.2, "z_loss": 1e-2, "ignore_index": 3},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [pytest.param(name, marks=pytest.mark.large if name in LARGE else ()) for name in SIZES]
)
def test_is_as_accurate_as_eager(implementation: Implementation, size: str, dtype: torch.dtype, device: str) -> None:
    assert_as_accurate_as_eager(implementation.adapted, random_inputs(*SIZES[size], device, dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["fused_pytorch", "fused_triton"])
def test_several_small_chunks_are_as_accurate(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Of seven tokens, the last of two: Triton's interpreter takes long for chunks of their real size."""
    implementation = family("loss").implementations[name]
    if reason := implementation.unavailable_reason(device):
        pytest.skip(reason)
    monkeypatch.setattr(fused, "chunk_tokens", lambda *sizes: 7)
    assert_as_accurate_as_eager(implementation.adapted, random_inputs(30, 24, 41, device, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_takes_every_option(implementation: Implementation, options: str, dtype: torch.dtype, device: str) -> None:
    ignored = OPTIONS[options].get("ignore_index", -100)
    inputs = random_inputs(40, 24, 97, device, dtype, ignored)
    assert_as_accurate_as_eager(implementation.adapted, inputs, **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_eager_is_the_formula(options: str, device: str) -> None:
    """Written out, row by row, from the definitions."""
    inputs = random_inputs(20, 8, 13, device, torch.float64, OPTIONS[options].get("ignore_index", -100))
    asked = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0} | OPTIONS[options]
    losses = []
    for row, target in zip(inputs.hidden @ inputs.weight.T, inputs.targets.tolist(), strict=True):
        if target == asked["ignore_index"]:
            continue
        log_z = row.exp().sum().log()
        wanted = torch.full_like(row, asked["label_smoothing"] / len(row))
        wanted[target] += 1 - asked["label_smoothing"]
        losses.append(-(wanted * (row - log_z)).sum() + asked["z_loss"] * log_z**2)
    found = eager_loss(inputs.hidden, inputs.weight, inputs.targets, **OPTIONS[options])
    torch.testing.assert_close(found, torch.stack(losses).mean())


@pytest.mark.parametrize("ignore_index", [-100, -1, 5, 10**6])
def test_ignores_any_index(implementation: Implementation, ignore_index: int, device: str) -> None:
    """As if its tokens were not there; one within the vocabulary too, and one far beyond it."""
    inputs = random_inputs(40, 16, 31, device, ignored=ignore_index)
    found = results(implementation.adapted, inputs, ignore_index=ignore_index)
    kept = inputs.targets != ignore_index
    wanted = results(eager_loss, replace(inputs, hidden=inputs.hidden[kept], targets=inputs.targets[kept]))
    torch.testing.assert_close(found["loss"], wanted["loss"])
    torch.testing.assert_close(found["grad_weight"], wanted["grad_weight"])
    torch.testing.assert_close(found["grad_hidden"][kept], wanted["grad_hidden"])
    assert (found["grad_hidden"][~kept] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3, 7])
def test_no_target_left_is_no_loss_and_no_gradient(
    implementation: Implementation, tokens: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """In no chunk, in one, and in several."""
    for module in (fused, chunked):
        monkeypatch.setattr(module, "chunk_tokens", lambda *sizes: 3)
    inputs = random_inputs(tokens, 8, 13, device)
    inputs.targets.fill_(-100)
    for name, found in results(implementation.adapted, inputs).items():
        assert (found == 0).all(), name


NON_CONTIGUOUS = {
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[:, ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
    "rows_apart": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "odd_offset": lambda x: torch.cat([x[:, :1], x], dim=-1)[:, 1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", NON_CONTIGUOUS)
def test_takes_non_contiguous_inputs(implementation: Implementation, how: str, dtype: torch.dtype, device: str) -> None:
    inputs = random_inputs(33, 24, 40, device, dtype)
    view = NON_CONTIGUOUS[how]
    targets = inputs.targets.repeat_interleave(2)[::2]
    apart = replace(inputs, hidden=view(inputs.hidden), weight=view(inputs.weight), targets=targets)
    assert not any(x.is_contiguous() for x in (apart.hidden, apart.weight, apart.targets))
    assert_as_accurate_as_eager(implementation.adapted, apart)


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_gives_gradients_to_what_requires_them(implementation: Implementation, needed: str, device: str) -> None:
    inputs = random_inputs(33, 8, 40, device)
    wanted = results(implementation.adapted, inputs)[f"grad_{needed}"]
    hidden, weight = inputs.hidden.requires_grad_(needed == "hidden"), inputs.weight.requires_grad_(needed == "weight")
    (3 * implementation.adapted(hidden, weight, inputs.targets)).backward()
    found, none = (hidden.grad, weight.grad) if needed == "hidden" else (weight.grad, hidden.grad)
    assert none is None
    torch.testing.assert_close(found, wanted)


def test_large_logits_do_not_overflow(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(40, 16, 31, device)
    assert_as_accurate_as_eager(implementation.adapted, replace(inputs, hidden=1000 * inputs.hidden))


@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_what_is_not_a_number_is_not_hidden(implementation: Implementation, where: str, device: str) -> None:
    inputs = random_inputs(40, 16, 31, device)
    getattr(inputs, where)[3, 5] = float("nan")
    found = results(implementation.adapted, inputs)
    assert found["loss"].isnan() and found["grad_hidden"][3].isnan().all() and found["grad_weight"].isnan().any()


def _penalty_gradient(loss_of: Loss, inputs: Inputs) -> Tensor:
    """The gradient in weight of a loss with a penalty on the gradient of hidden."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = loss_of(hidden, weight, inputs.targets)
    (grad_hidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    return torch.autograd.grad(loss + grad_hidden.square().sum(), weight)[0]


@pytest.mark.compiled_every_time
def test_a_second_derivative_is_right_or_a_clear_error(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(20, 8, 13, device)
    try:
        found = _penalty_gradient(implementation.adapted, inputs)
    except RuntimeError as error:
        message = str(error)
        assert re.search(r"double backward|derivative for \S+ is not implemented|does not require grad", message), (
            message
        )
    else:
        torch.testing.assert_close(found, _penalty_gradient(eager_loss, inputs), rtol=1e-4, atol=1e-5)


def test_a_second_backward_pass_is_right_or_a_clear_error(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(20, 8, 13, device)
    hidden = inputs.hidden.requires_grad_()
    loss = implementation.adapted(hidden, inputs.weight, inputs.targets)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    first = hidden.grad.clone()
    outcome = None
    try:
        loss.backward()
    except RuntimeError as error:
        outcome = str(error)
    if outcome is None:
        torch.testing.assert_close(hidden.grad, 2 * first)
    else:
        assert re.search("second|twice", outcome), outcome
        torch.testing.assert_close(hidden.grad, first)


AUTOCAST = {"float32": (torch.float32, torch.float32), "mixed": (torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("how", AUTOCAST)
def test_under_autocast_products_are_in_its_dtype_and_the_loss_in_float32(
    implementation: Implementation, how: str, device: str
) -> None:
    """As a Linear and torch's cross_entropy do; mixed: the last layer's output is in half precision already."""
    inputs = random_inputs(60, 32, 97, device)
    dtypes = AUTOCAST[how]

    def under_autocast(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return implementation.adapted(hidden.to(dtypes[0]), weight.to(dtypes[1]), targets)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = torch.nn.functional.linear(hidden.to(dtypes[0]), weight.to(dtypes[1]))
            assert logits.dtype == torch.bfloat16
            return torch.nn.functional.cross_entropy(logits, targets)

    exact = results(eager_loss, inputs.to(torch.float64))
    found, wanted = results(under_autocast, inputs), results(plain, inputs)
    half = rounding(inputs.to(torch.float64), torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps, {})
    for name, x in found.items():
        assert x.dtype == torch.float32
        if name == "loss" and implementation.target is linear_cross_entropy:
            half[name] += HALF_LOSS * torch.finfo(torch.bfloat16).eps * exact[name].abs().item()
        error, plain_error = ((y.double() - exact[name]).abs().max().item() for y in (x, wanted[name]))
        assert error <= 2 * max(plain_error, half[name]), f"{name}: {error:.2e} against {plain_error:.2e}"
    full = results(implementation.adapted, inputs)["loss"]
    assert found["loss"] != full  # autocast is not ignored


def test_a_gradient_scaler_lifts_small_gradients_of_half_precision(implementation: Implementation, device: str) -> None:
    """Of a mean over many tokens each one's gradient is too small for float16, unless the loss is scaled."""
    inputs = replace(random_inputs(128, 8, 1500, device, torch.float16, ignored=None), grad=2.0**16)
    exact = results(eager_loss, inputs.to(torch.float64))["grad_weight"]
    found = results(implementation.adapted, inputs)["grad_weight"].double()
    error = (found - exact).norm() / exact.norm()
    assert error <= 0.01, f"relative error {error:.4f}"


SCALES = {  # dtypes of the inputs and of autocast, and what the gradients of the sum are multiplied by
    "bfloat16": (torch.bfloat16, None, 1 / 7777),
    "float16": (torch.float16, None, 100_003.0),
    "autocast": (torch.float32, torch.bfloat16, 1 / 7777),
}


@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("name", ["fused_pytorch", "fused_triton"])
def test_the_scale_of_gradients_is_not_rounded_to_half_precision(name: str, how: str, device: str) -> None:
    """Else all were too large or too small by up to half of what bfloat16 resolves, or infinite in float16."""
    implementation = family("loss").implementations[name]
    if reason := implementation.unavailable_reason(device):
        pytest.skip(reason)
    dtype, product, scale = SCALES[how]
    inputs = random_inputs(16, 1024, 40, device, ignored=None)
    inputs = replace(inputs, hidden=2.0**6 * inputs.hidden, weight=2.0**-6 * inputs.weight).to(dtype)

    def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=product, enabled=product is not None):
            return implementation.adapted(hidden, weight, targets)

    summed, found = (results(loss_of, replace(inputs, grad=16 * by))["grad_hidden"].double() for by in (1.0, scale))
    bias = ((found - scale * summed) * summed.sign()).sum() / (scale * summed).abs().sum()  # random errors cancel
    assert abs(bias.item()) < 2**-12, f"{bias.item() * 2**12:.2f} of 2^-12"


MISMATCHED = {  # shapes of hidden, weight and targets, and what the message says of them
    "dim": ((4, 8), (5, 16), (4,), r"hidden \(4, 8\), weight \(5, 16\)"),
    "tokens": ((4, 8), (5, 8), (3,), r"targets \(3,\)"),
    "batched": ((2, 4, 8), (5, 8), (2, 4), r"hidden \(2, 4, 8\)"),
    "empty": ((4, 8), (0, 8), (4,), r"loss over nothing: weight \(0, 8\)"),
}


@pytest.mark.compiled_every_time
@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_one_line(implementation: Implementation, how: str, device: str) -> None:
    *shapes, targets_shape, message = MISMATCHED[how]
    hidden, weight = (torch.randn(shape, device=device) for shape in shapes)
    targets = torch.zeros(targets_shape, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        implementation.adapted(hidden, weight, targets)


@pytest.mark.compiled_every_time
def test_dtypes_devices_and_options_that_do_not_go_together_are_one_line(
    implementation: Implementation, device: str
) -> None:
    x = random_inputs(4, 8, 5, device)
    wrong: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, float]]] = {
        r"one floating dtype .*got torch.float32, torch.float64": ((x.hidden, x.weight.double(), x.targets), {}),
        r"one floating dtype .*got torch.int32, torch.int32": ((x.hidden.int(), x.weight.int(), x.targets), {}),
        r"targets of torch.int64, got torch.int32": ((x.hidden, x.weight, x.targets.int()), {}),
        r"on one device, got .*meta": ((x.hidden, x.weight.to("meta"), x.targets), {}),
        r"label_smoothing is from 0 to 1, got 1.5": ((x.hidden, x.weight, x.targets), {"label_smoothing": 1.5}),
        r"z_loss is 0 or more and finite, got -1": ((x.hidden, x.weight, x.targets), {"z_loss": -1.0}),
        r"z_loss is 0 or more and finite, got inf": ((x.hidden, x.weight, x.targets), {"z_loss": float("inf")}),
        r"z_loss is 0 or more and finite, got nan": ((x.hidden, x.weight, x.targets), {"z_loss": float("nan")}),
    }
    for message, (arguments, options) in wrong.items():
        with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
            implementation.adapted(*arguments, **options)


@pytest.mark.compiled_every_time
@pytest.mark.parametrize("target", [-1, 5, 10**12, -101])
def test_a_target_out_of_range_is_one_line(implementation: Implementation, target: int, device: str) -> None:
    if device == "cuda":
        pytest.skip("there it is a device-side assertion, after which the process has no use of its GPU")
    x = random_inputs(4, 8, 5, device)
    x.targets[2] = target
    with pytest.raises(ValueError, match=rf"^[^\n]*in \[0, 5\)[^\n]*targets\[2\] is {target}$"):
        implementation.adapted(x.hidden, x.weight, x.targets)


def test_off_the_cpu_the_range_is_checked_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where reading an answer is an error, as it would be a wait on CUDA."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asked.append(message))
    hidden, weight, targets = (torch.empty(n, 8, device="meta") for n in (4, 5, 4))
    check_inputs(hidden, weight, targets[:, 0].long(), -100, 0.0, 0.0)
    assert asked == ["loss: a target is out of range: neither in [0, 5) nor -100"]


def test_is_deterministic(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(40, 24, 97, device)
    first, second = (results(implementation.adapted, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_planted_faults_are_caught(device: str) -> None:
    """The tolerance is tight enough: a target off by one, a mean over all, a row left out, a scale forgotten."""
    inputs = random_inputs(300, 24, 97, device)
    inputs.targets[0] = 0  # the one that the first fault mistakes
    options = {"label_smoothing": 0.1, "z_loss": 1e-2}

    def off_by_one(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return fused_loss_pytorch(hidden, weight, (targets + (targets == 0).long()), **options)

    def over_all(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return fused_loss_pytorch(hidden, weight, targets, **options) * (targets != -100).float().mean()

    def last_left_out(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return fused_loss_pytorch(hidden[:-1], weight, targets[:-1], **options)

    def nearly(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return fused_loss_pytorch(hidden, weight, targets, **options) * 1.0001

    def no_z_loss(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return fused_loss_pytorch(hidden, weight, targets, label_smoothing=0.1)

    assert_as_accurate_as_eager(fused_loss_pytorch, inputs, **options)
    for wrong in (off_by_one, over_all, last_left_out, nearly, no_z_loss):
        with pytest.raises(AssertionError, match="error"):
            assert_as_accurate_as_eager(wrong, inputs, **options)


NOT_LOSSES = {
    "lambda *a, **k: 1.0": "it returned 1.0, and not a scalar tensor",
    "lambda h, w, t, **k: (h @ w.T).logsumexp(-1)": r"it returned a tensor \(6,\)",
    "lambda h, w, t, **k: (h @ w.T).logsumexp(-1).mean()": "where the cross entropy is",
    "lambda h, w, t, **k: torch.nn.functional.cross_entropy(h.detach() @ w.T, t)": "not differentiable in hidden",
    "3": "3 is not callable",
}


@pytest.mark.parametrize("expression", NOT_LOSSES)
def test_what_is_no_loss_is_told_in_one_line(expression: str, tmp_path: Any) -> None:
    (own := tmp_path / f"own_{abs(hash(expression))}.py").write_text(f"import torch\nmine = {expression}\n")
    with pytest.raises(RegistryError, match=rf"^[^\n]*{NOT_LOSSES[expression]}[^\n]*$"):
        check_contract(resolve("loss", f"{own}:mine"), "cpu")
