"""Every attention implementation against float64: outputs, gradients, shapes, masks, dtypes and errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.accuracy import assert_as_accurate_as_eager, random_inputs, results
from impl.attention import FlashAttentionPyTorch, as_attention, check_inputs, eager_attention
from shardmark.registry import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]

SDPA = {"sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"}
"""PyTorch's own, as they are."""

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
    "head_dim_80": ((1,), 70, 33, 80),
    "head_dim_96": ((1,), 33, 70, 96),
    "head_dim_128": ((1,), 140, 150, 128),
}

LARGE = ("tile", "tile_and_one", "one_less_than_tiles")

GROUPED = {  # leading dims of q, leading dims of k and v
    "two_groups": ((2, 4), (2, 2)),
    "one_key_head": ((2, 3), (2, 1)),
    "heads_alone": ((6,), (2,)),
    "many_leading_dims": ((2, 1, 4), (2, 1, 2)),
}


def _inputs(shape_id: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random q, k, v and the output's gradient."""
    leading, q_len, k_len, head_dim = SHAPES[shape_id]
    return random_inputs((*leading, q_len, head_dim), (*leading, k_len, head_dim), dtype, device)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape_id", [pytest.param(name, marks=pytest.mark.large if name in LARGE else ()) for name in SHAPES]
)
@pytest.mark.compiled_every_time("fewer_keys-torch.float32-causal", "tile_and_one-torch.bfloat16-full")
def test_is_as_accurate_as_eager(
    implementation: Implementation, shape_id: str, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    assert_as_accurate_as_eager(implementation.adapted, _inputs(shape_id, dtype, device), is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", GROUPED)
def test_takes_grouped_query_heads(implementation: Implementation, heads: str, is_causal: bool, device: str) -> None:
    q_leading, k_leading = GROUPED[heads]
    inputs = random_inputs((*q_leading, 45, 16), (*k_leading, 33, 16), torch.float32, device)
    assert_as_accurate_as_eager(implementation.adapted, inputs, is_causal)


NON_CONTIGUOUS = {
    "heads_inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),  # as a projection's (seq, heads) view
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", NON_CONTIGUOUS)
def test_takes_non_contiguous_inputs(implementation: Implementation, how: str, dtype: torch.dtype, device: str) -> None:
    inputs = [NON_CONTIGUOUS[how](x) for x in _inputs("many_leading_dims", dtype, device)]
    assert not any(x.is_contiguous() for x in inputs)
    assert_as_accurate_as_eager(implementation.adapted, inputs, is_causal=True)


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


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_what_is_not_finite_reaches_what_it_concerns_and_no_more_than_in_eager(
    implementation: Implementation, is_causal: bool, value: float, where: str, device: str
) -> None:
    """Eager multiplies what a query does not see by zero, which is NaN; an implementation may leave it out instead."""
    if implementation.spec in SDPA:
        pytest.skip(
            "PyTorch's SDPA differs: on CPU its flash kernel loses a NaN in q, and its math kernel adds the mask"
        )
    inputs = _inputs("no_leading_dims", torch.float32, device)
    inputs[0][:, 2] = inputs[0][:, 2].abs() + 0.1  # so that the sign of an infinity in k is the scores' as well
    inputs["qkv".index(where)][3, 2] = value
    found, eager, seen = (
        {name: ~x.isfinite() for name, x in results(attention, inputs, is_causal).items()}
        for attention in (implementation.adapted, eager_attention, _row_by_row)
    )
    for name, of_seen in seen.items():
        assert (found[name] | ~of_seen).all(), f"{name} is finite where it depends on a {value} in {where}"
        assert (eager[name] | ~found[name]).all(), f"{name} is not finite where eager's is, with a {value} in {where}"


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Each query over the keys it sees and no others."""
    if not is_causal:
        return eager_attention(q, k, v)
    return torch.cat([eager_attention(q[i : i + 1], k[: i + 1], v[: i + 1]) for i in range(q.shape[0])])


def test_a_row_of_scores_that_are_all_minus_infinity_is_nan(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("no_leading_dims", torch.float32, device)
    q[3], k[:, 0] = 0.0, k[:, 0].abs() + 1
    q[3, 0] = -float("inf")
    out = implementation.adapted(q, k, v)
    if not out[3].isnan().any() and (out[3] == 0).all() and implementation.spec in SDPA:
        pytest.skip("PyTorch's SDPA defines such a row as zero")
    assert out[3].isnan().all() and out[[0, 1, 2, 4, 5, 6]].isfinite().all()


def test_keys_at_minus_infinity_count_for_nothing(implementation: Implementation, device: str) -> None:
    """More of them than a tile has, and before the others: the first tile leaves nothing to subtract."""
    q, k, v, _ = random_inputs((2, 5, 16), (2, 600, 16), torch.float32, device)
    q[..., 0], k[:, :550, 0] = q[..., 0].abs() + 0.1, -float("inf")
    out = implementation.adapted(q, k, v)
    torch.testing.assert_close(out, eager_attention(q, k[:, 550:], v[:, 550:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "kv"])
def test_gives_gradients_to_the_inputs_that_require_them(
    implementation: Implementation, needed: str, device: str
) -> None:
    inputs = _inputs("no_leading_dims", torch.float32, device)
    wanted = results(implementation.adapted, inputs, is_causal=True)
    q, k, v = (x.requires_grad_(name in needed) for name, x in zip("qkv", inputs[:3], strict=True))
    implementation.adapted(q, k, v, is_causal=True).backward(inputs[3])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name in needed:
            torch.testing.assert_close(x.grad, wanted[f"d{name}"])
        else:
            assert x.grad is None


def _penalty_gradient(attention: Any, inputs: list[Tensor]) -> Tensor:
    """The gradient in k of a loss with a penalty on the gradient of q."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, is_causal=True)
    (grad_q,) = torch.autograd.grad(out, q, inputs[3], create_graph=True)
    return torch.autograd.grad(out.sum() + grad_q.square().sum(), k)[0]


@pytest.mark.compiled_every_time
def test_a_second_derivative_is_right_or_a_clear_error(implementation: Implementation, device: str) -> None:
    inputs = _inputs("no_leading_dims", torch.float32, device)
    try:
        found = _penalty_gradient(implementation.adapted, inputs)
    except (RuntimeError, NotImplementedError) as error:
        message = str(error)
        assert re.search(r"double backward|derivative for \S+ is not implemented|create_graph=False", message), message
    else:
        torch.testing.assert_close(found, _penalty_gradient(eager_attention, inputs), rtol=1e-4, atol=1e-4)


def test_is_deterministic(implementation: Implementation, device: str) -> None:
    inputs = _inputs("many_leading_dims", torch.float32, device)
    first, second = (results(implementation.adapted, inputs, is_causal=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


MISMATCHED = {  # shapes of q, k, v, and what the message says of them
    "head_dim": ((2, 4, 8), (2, 5, 16), (2, 5, 16), r"q \(2, 4, 8\), k \(2, 5, 16\)"),
    "leading_dims": ((2, 4, 8), (3, 4, 8), (3, 4, 8), "same leading dims"),
    "k_and_v": ((2, 4, 8), (2, 5, 8), (2, 6, 8), r"v \(2, 6, 8\)"),
    "no_seq": ((8,), (8,), (8,), r"q \(8,\)"),
    "empty": ((2, 0, 8), (2, 0, 8), (2, 0, 8), "attention over nothing"),
}


@pytest.mark.compiled_every_time
@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_one_line(implementation: Implementation, how: str, device: str) -> None:
    q, k, v = (torch.randn(shape, device=device) for shape in MISMATCHED[how][:3])
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        implementation.adapted(q, k, v)
    with pytest.raises(ValueError, match=MISMATCHED[how][3]):
        check_inputs(q, k, v)


@pytest.mark.compiled_every_time
def test_dtypes_that_do_not_go_together_are_one_line(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("one_query", torch.float32, device)
    float8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for wrong in ((q, k.double(), v), (q.int(), k.int(), v.int()), float8):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            implementation.adapted(*wrong)
    with pytest.raises(ValueError, match=r"one floating dtype .*got torch.float32, torch.float64, torch.float32"):
        check_inputs(q, k.double(), v)


@pytest.mark.compiled_every_time
def test_devices_that_do_not_go_together_are_one_line(implementation: Implementation, device: str) -> None:
    q, k, v, _ = _inputs("one_query", torch.float32, device)
    with pytest.raises(ValueError, match=rf"^attention takes q, k, v on one device, got {device}\S*, meta, {device}"):
        implementation.adapted(q, k.to("meta"), v)


def test_autocast_does_not_change_the_result_of_float32_inputs_much(
    implementation: Implementation, device: str
) -> None:
    """Implementations may follow autocast or not; they may not fail under it, or be worse than bfloat16."""
    inputs = _inputs("fewer_keys", torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = results(implementation.adapted, inputs, is_causal=True)
    exact = results(eager_attention, [x.double() for x in inputs], is_causal=True)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=0.1, atol=0.1, msg=lambda m, n=name: f"{n}: {m}")


def test_flash_saves_only_inputs_output_and_log_sum_exp(implementation: Implementation, device: str) -> None:
    if not (isinstance(implementation.target, type) and issubclass(implementation.target, torch.autograd.Function)):
        pytest.skip(f"{implementation.name} is not a torch.autograd.Function, so what it saves is not in its contract")
    q, k, v, _ = _inputs("fewer_keys", torch.float32, device)
    out = implementation.target.apply(q.requires_grad_(), k, v, False)
    saved = list(out.grad_fn.saved_tensors)
    lse = (q @ k.mT / q.shape[-1] ** 0.5).logsumexp(-1)
    expected = {"q": q, "k": k, "v": v, "output": out, "log-sum-exp": lse}
    for name, wanted in expected.items():
        found = [x for x in saved if x.shape == wanted.shape and torch.allclose(x, wanted.to(x.dtype), atol=1e-5)]
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
            assert_as_accurate_as_eager(wrong, inputs, is_causal=True)
