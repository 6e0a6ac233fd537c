"""Every attention implementation against float64: outputs, gradients, shapes, masks, dtypes and errors.

The tolerance is twice the error of eager attention in the same dtype, or twice one rounding of the largest sum of
absolute terms behind the result where that is more: on tiny inputs eager can be exact by luck, or a sum can cancel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from impl.attention import FlashAttentionPyTorch, as_attention, check_inputs, eager_attention
from shardmark.registry import Implementation

pytestmark = pytest.mark.family("attention")

SHAPES = {  # leading dims, q_len, k_len, head_dim
    "one_key": ((2,), 3, 1, 16),
    "one_query": ((2,), 1, 5, 16),
    "no_leading_dims": ((), 7, 7, 8),
    "many_leading_dims": ((2, 1, 3), 33, 33, 24),
    "tile": ((2,), 256, 256, 64),
    "tile_and_one": ((1,), 257, 257, 64),
    "one_less_than_tiles": ((1,), 511, 511, 16),
    "fewer_keys": ((2, 2), 301, 97, 32),
    "more_keys": ((2, 2), 97, 301, 32),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialized is NaN, so that what is never written is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _inputs(shape_id: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random q, k, v and the output's gradient."""
    leading, q_len, k_len, head_dim = SHAPES[shape_id]
    lengths = (q_len, k_len, k_len, q_len)
    return [torch.randn(*leading, length, head_dim, device=device).to(dtype) for length in lengths]


def _results(attention, inputs: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _terms(inputs: list[Tensor], is_causal: bool) -> dict[str, float]:
    """The largest sum of absolute terms in each result: a rounding of it is the least that arithmetic owes."""
    q, k, v, grad = inputs
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    probs = scores.softmax(-1)
    p = probs * (1 + scale * q.abs() @ k.abs().mT)  # exp turns a score's absolute error into a relative one
    # Of ds = p (dp - delta): dp and delta are sums over head_dim, and may cancel.
    ds = p * (grad.abs() @ v.abs().mT + (grad * (probs @ v)).abs().sum(-1, keepdim=True))
    terms = {"out": p @ v.abs(), "dq": scale * ds @ k.abs(), "dk": scale * ds.mT @ q.abs(), "dv": p.mT @ grad.abs()}
    return {name: x.max().item() for name, x in terms.items()}


def _assert_as_accurate_as_eager(attention, inputs: list[Tensor], is_causal: bool) -> None:
    dtype = inputs[0].dtype
    exact = _results(eager_attention, [x.double() for x in inputs], is_causal)
    plain = _results(eager_attention, inputs, is_causal)
    terms = _terms([x.double() for x in inputs], is_causal)
    for name, found in _results(attention, inputs, is_causal).items():
        assert found.dtype == dtype and found.shape == exact[name].shape
        error, plain_error = ((x.double() - exact[name]).abs().max().item() for x in (found, plain[name]))
        allowed = 2 * max(plain_error, torch.finfo(dtype).eps * terms[name])
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, ratio {error / allowed:.2f}"


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape_id", SHAPES)
def test_is_as_accurate_as_eager(
    implementation: Implementation, shape_id: str, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    _assert_as_accurate_as_eager(implementation.adapted, _inputs(shape_id, dtype, device), is_causal)


def test_takes_non_contiguous_inputs(implementation: Implementation, device: str) -> None:
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in _inputs("fewer_keys", torch.float32, device)]
    assert not any(x.is_contiguous() for x in inputs)
    _assert_as_accurate_as_eager(implementation.adapted, inputs, is_causal=True)


def test_a_query_does_not_see_later_keys(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("tile_and_one", torch.float32, device)
    out = implementation.adapted(q, k, v, is_causal=True)
    for changed in (0, 100, 255, 256):
        k2, v2 = k.clone(), v.clone()
        k2[..., changed, :], v2[..., changed, :] = 100.0, 100.0
        out2 = implementation.adapted(q, k2, v2, is_causal=True)
        assert torch.equal(out[..., :changed, :], out2[..., :changed, :])
        assert not torch.equal(out[..., changed:, :], out2[..., changed:, :])


def test_large_scores_do_not_overflow(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("tile", torch.float32, device)
    out = implementation.adapted(100 * q, 100 * k, v, is_causal=True)
    assert out.isfinite().all()


MISMATCHED = {  # shapes of q, k, v, and what the message says of them
    "head_dim": ((2, 4, 8), (2, 5, 16), (2, 5, 16), r"q \(2, 4, 8\), k \(2, 5, 16\)"),
    "leading_dims": ((2, 4, 8), (3, 4, 8), (3, 4, 8), "same leading dims"),
    "k_and_v": ((2, 4, 8), (2, 5, 8), (2, 6, 8), r"v \(2, 6, 8\)"),
    "no_seq": ((8,), (8,), (8,), r"q \(8,\)"),
    "empty": ((2, 0, 8), (2, 0, 8), (2, 0, 8), "attention over nothing"),
}


@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_one_line(implementation: Implementation, how: str, device: str) -> None:
    q, k, v = (torch.randn(shape, device=device) for shape in MISMATCHED[how][:3])
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        implementation.adapted(q, k, v)
    with pytest.raises(ValueError, match=MISMATCHED[how][3]):
        check_inputs(q, k, v)


def test_dtypes_that_do_not_go_together_are_one_line(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("one_query", torch.float32, device)
    for wrong in ((q, k.double(), v), (q.int(), k.int(), v.int())):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            implementation.adapted(*wrong)
    with pytest.raises(ValueError, match=r"one floating dtype, got torch.float32, torch.float64, torch.float32"):
        check_inputs(q, k.double(), v)


def test_autocast_does_not_change_the_result_of_float32_inputs_much(
    implementation: Implementation, device: str
) -> None:
    """Implementations may follow autocast or not; they may not fail under it, or be worse than bfloat16."""
    inputs = _inputs("fewer_keys", torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = _results(implementation.adapted, inputs, is_causal=True)
    exact = _results(eager_attention, [x.double() for x in inputs], is_causal=True)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=0.1, atol=0.1, msg=lambda m, n=name: f"{n}: {m}")


def test_flash_saves_only_inputs_output_and_log_sum_exp(implementation: Implementation, device: str) -> None:
    if not (isinstance(implementation.target, type) and issubclass(implementation.target, torch.autograd.Function)):
        pytest.skip(f"{implementation.name} is not a torch.autograd.Function, so what it saves is not in its contract")
    q, k, v, _ = _inputs("fewer_keys", torch.float64, device)
    out = implementation.target.apply(q.requires_grad_(), k, v, False)
    saved = list(out.grad_fn.saved_tensors)
    lse = (q @ k.mT / q.shape[-1] ** 0.5).logsumexp(-1)
    expected = {"q": q, "k": k, "v": v, "output": out, "log-sum-exp": lse}
    for name, wanted in expected.items():
        found = [x for x in saved if x.shape == wanted.shape and torch.allclose(x, wanted.to(x.dtype))]
        assert found, f"it does not save its {name}, but tensors of {[tuple(x.shape) for x in saved]}"
    assert len(saved) == len(expected), f"it saves more than {', '.join(expected)}: {[tuple(x.shape) for x in saved]}"


def test_planted_faults_are_caught(device: str) -> None:
    """The tolerance is tight enough: a mask off by one, a tile left out, a scale forgotten."""
    inputs = _inputs("tile_and_one", torch.float32, device)
    flash = as_attention(FlashAttentionPyTorch)

    def off_by_one(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(2)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    def tile_left_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        return flash(q, k[..., :256, :], v[..., :256, :], is_causal=is_causal)

    def unscaled(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        return flash(q * 1.001, k, v, is_causal=is_causal)

    for wrong in (off_by_one, tile_left_out, unscaled):
        with pytest.raises(AssertionError, match="error"):
            _assert_as_accurate_as_eager(wrong, inputs, is_causal=True)
