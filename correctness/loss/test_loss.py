"""Every loss against float64: value and gradients, options, ignored targets, sizes, strides, dtypes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness.engine.examples import one_beyond_tiles
from correctness.engine.strides import far_apart
from correctness.loss.accuracy import Inputs, assert_as_accurate_as_eager, random_inputs, results
from correctness.loss.events import LAYOUTS
from correctness.support.contracts import assert_near
from impl.loss import chunked, eager_loss, fused
from shardmark.api.finding import RegistryError
from shardmark.api.registry import Implementation, check_contract, family, resolve

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

SUM_IN_HALF = ("chunked", "linear_cross_entropy")
"""Implementations that sum the gradients of their chunks in half precision."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 1e-2},
    "everything": {"label_smoothing": 0.2, "z_loss": 1e-2, "ignore_index": 3},
}


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 30, 31, 10**6, -(2**32)])
def test_ignores_any_index(implementation: Implementation, ignore_index: int, device: str) -> None:
    """Ignored tokens change nothing, for an index inside the vocabulary (its first, its last) and far outside it."""
    inputs = random_inputs(40, 16, 31, device, ignored=ignore_index)
    inputs.targets[2], inputs.targets[3] = 0, 30
    found = results(implementation.watched, inputs, ignore_index=ignore_index)
    kept = inputs.targets != ignore_index
    wanted = results(eager_loss, replace(inputs, hidden=inputs.hidden[kept], targets=inputs.targets[kept]))
    of_ignored = found["grad_hidden"][~kept]
    assert (of_ignored == 0).all(), f"hidden's gradient at ignored tokens is up to {of_ignored.abs().max():.2g}, not 0"
    found["grad_hidden"] = found["grad_hidden"][kept]
    assert_near(found, wanted, f"with ignore_index={ignore_index}", share=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_takes_every_option(implementation: Implementation, options: str, dtype: torch.dtype, device: str) -> None:
    ignored = OPTIONS[options].get("ignore_index", -100)
    inputs = random_inputs(40, 24, 97, device, dtype, ignored)
    assert_as_accurate_as_eager(implementation.watched, inputs, **OPTIONS[options])


@pytest.mark.parametrize(
    "option", [{"label_smoothing": 0.5}, {"z_loss": 0.1}, {"ignore_index": 7}], ids=lambda option: next(iter(option))
)
def test_options_count_every_word(implementation: Implementation, option: dict[str, Any], device: str) -> None:
    """A vocabulary of more words than a kernel's largest block."""
    inputs = random_inputs(3, 2, 40_000, device, ignored=option.get("ignore_index", -100))
    found = results(implementation.watched, inputs, **option)
    wanted = results(eager_loss, inputs.to(torch.float64), **option)
    assert_near(found, wanted, f"of 40,000 words with {option}", share=1e-2)


def test_takes_offsets_beyond_32_bits(implementation: Implementation, device: str) -> None:
    """The number of a row times its stride, as of a slice of a buffer for all layers, is more than 32 bits hold."""
    inputs = random_inputs(3, 16, 3, device, torch.bfloat16)
    hidden, weight = far_apart(0, inputs.hidden, inputs.weight)
    assert_as_accurate_as_eager(implementation.watched, replace(inputs, hidden=hidden, weight=weight))


SIZES = {  # tokens, dim, vocab
    "one_token": (1, 16, 33),
    "one_word": (5, 8, 1),
    "one_column": (7, 1, 97),
    "odd": (37, 29, 515),
    "wide": (5, 1025, 17),
    "chunk_and_one": (513, 24, 40),
    "several_chunks": (1200, 8, 12),
    "beyond_2048": (2049, 8, 12),
    "beyond_a_block": (9, 8, 1030),
    "longer_than_a_block": (4, 8, 8200),
    "words_beyond_65536": (8, 4, 65_600),
    "many_chunks": (2049, 8, 1030),
}

LARGE = ("chunk_and_one", "several_chunks", "beyond_2048", "many_chunks")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [pytest.param(name, marks=pytest.mark.large if name in LARGE else ()) for name in SIZES]
)
def test_is_as_accurate_as_eager(implementation: Implementation, size: str, dtype: torch.dtype, device: str) -> None:
    if implementation.spec in SUM_IN_HALF and size in ("beyond_2048", "many_chunks") and dtype.itemsize == 2:
        pytest.skip("it sums the gradients of its chunks in half precision: with more chunks its error is larger")
    assert_as_accurate_as_eager(implementation.watched, random_inputs(*SIZES[size], device, dtype))


@pytest.mark.parametrize("tokens", [pytest.param(65_540, marks=pytest.mark.large)])
def test_takes_more_tokens_than_16_bits_count(implementation: Implementation, tokens: int, device: str) -> None:
    inputs = random_inputs(tokens, 2, 5, device)
    inputs.targets[: tokens // 2].masked_fill_(torch.arange(tokens // 2, device=device) % 50 > 0, -100)
    inputs.hidden[tokens // 2 :] *= 3  # chunks of few targets count less, and have another mean
    wanted = results(eager_loss, inputs.to(torch.float64))
    assert_near(results(implementation.watched, inputs), wanted, f"of {tokens:,} tokens")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["fused_pytorch", "fused_triton"])
def test_several_small_chunks_are_as_accurate(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Chunks of seven tokens, the last of two: real sizes are slow in Triton's interpreter."""
    implementation = family("loss").implementations[name]
    if reason := implementation.unavailable_reason(device):
        pytest.skip(reason)
    monkeypatch.setattr(fused, "chunk_tokens", lambda *sizes: 7)
    assert_as_accurate_as_eager(implementation.watched, random_inputs(30, 24, 41, device, dtype))


@pytest.mark.parametrize("options", OPTIONS)
def test_eager_is_the_formula(options: str, device: str) -> None:
    """Loss computed row by row from its definition."""
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


@pytest.mark.should("where every target is ignored, loss and gradients are 0")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tokens", [0, 3, 7])
def test_no_target_left_is_no_loss_and_no_gradient(
    implementation: Implementation, tokens: int, options: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """No chunk, one chunk, and several."""
    for module in (fused, chunked):
        monkeypatch.setattr(module, "chunk_tokens", lambda *sizes: 3)
    _assert_zero(implementation, random_inputs(tokens, 8, 13, device), OPTIONS[options])


@pytest.mark.should("where every target is ignored, loss and gradients are 0")
@pytest.mark.parametrize("sign", [1, -1], ids=["high", "low"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 45.0), (torch.float32, 1e15)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_no_target_left_of_large_logits(
    implementation: Implementation, options: str, dtype: torch.dtype, size: float, sign: int, device: str
) -> None:
    """Finite values whose sum overflows float16, or whose square overflows float32: 0 * inf is NaN, not 0."""
    inputs = random_inputs(40, 8, 13, device, dtype)
    inputs.hidden.fill_(sign * size)
    inputs.weight.fill_(size * (40 if dtype == torch.float32 else 0.9))
    _assert_zero(implementation, inputs, OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_large_logits_of_ignored_targets_change_nothing(
    implementation: Implementation, options: str, device: str
) -> None:
    """Ignored targets beside counted ones: a square that overflows float32, times zero, is NaN."""
    ignored = OPTIONS[options].get("ignore_index", -100)
    inputs = random_inputs(40, 8, 13, device, ignored=ignored)
    kept = inputs.targets != ignored
    few = replace(inputs, hidden=inputs.hidden[kept], targets=inputs.targets[kept])
    wanted = results(eager_loss, few.to(torch.float64), **OPTIONS[options])
    inputs.hidden[~kept] *= 1e25
    found = results(implementation.watched, inputs, **OPTIONS[options])
    found["grad_hidden"] = found["grad_hidden"][kept]
    assert_near(found, wanted, "with logits of 1e25 at ignored targets", share=1e-5)


def _assert_zero(implementation: Implementation, inputs: Inputs, options: dict[str, Any]) -> None:
    inputs.targets.fill_(options.get("ignore_index", -100))
    for name, found in results(implementation.watched, inputs, **options).items():
        first, tokens = found.flatten()[:3].tolist(), len(inputs.targets)
        assert (found == 0).all(), f"of {tokens} tokens, all ignored, {name} is {first}, not 0"


@pytest.mark.large
@pytest.mark.examples(25, 100, 399)
@pytest.mark.parametrize("of", ["tokens", "words"])
def test_none_is_lost_of_any_number(implementation: Implementation, examples: int, of: str, device: str) -> None:
    """For any tile size, the last token and the last vocabulary entry count."""
    for n in one_beyond_tiles(examples):
        inputs = random_inputs(n if of == "tokens" else 3, 4, 5 if of == "tokens" else n, device, ignored=None)
        inputs.targets[-1:] = len(inputs.weight) - 1
        found = results(implementation.watched, inputs)
        assert_near(found, results(eager_loss, inputs.to(torch.float64)), f"of {n} {of}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["columns_apart", "rows_inside", "rows_apart", "odd_offset"])
def test_takes_non_contiguous_inputs(implementation: Implementation, how: str, dtype: torch.dtype, device: str) -> None:
    inputs = random_inputs(33, 24, 40, device, dtype)
    view = LAYOUTS[how]
    targets = inputs.targets.repeat_interleave(2)[::2]
    apart = replace(inputs, hidden=view(inputs.hidden), weight=view(inputs.weight), targets=targets)
    assert not any(x.is_contiguous() for x in (apart.hidden, apart.weight, apart.targets))
    assert_as_accurate_as_eager(implementation.watched, apart)


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_gives_gradients_to_what_requires_them(implementation: Implementation, needed: str, device: str) -> None:
    inputs = random_inputs(33, 8, 40, device)
    wanted = results(eager_loss, inputs.to(torch.float64))[f"grad_{needed}"]
    hidden, weight = inputs.hidden.requires_grad_(needed == "hidden"), inputs.weight.requires_grad_(needed == "weight")
    (3 * implementation.watched(hidden, weight, inputs.targets)).backward()
    found, none = (hidden.grad, weight.grad) if needed == "hidden" else (weight.grad, hidden.grad)
    assert none is None, f"what requires no gradient has one, where {needed} alone requires one"
    assert found is not None, f"{needed} alone requires a gradient, and has none"
    assert_near({needed: found}, {needed: wanted}, f"where {needed} alone requires a gradient")


NOT_LOSSES = {
    "lambda *a, **k: 1.0": "it returned 1.0, and not a scalar tensor",
    "lambda h, w, t, **k: (h @ w.T).logsumexp(-1)": r"it returned a tensor \(6,\)",
    "lambda h, w, t, **k: (h @ w.T).logsumexp(-1).sum()": "where the cross entropy is",
    "lambda h, w, t, **k: torch.nn.functional.cross_entropy(h.detach() @ w.T, t)": "not differentiable in hidden",
    "3": "3 is not callable",
}


@pytest.mark.parametrize("expression", NOT_LOSSES)
def test_what_is_no_loss_is_told_in_one_line(expression: str, tmp_path: Any) -> None:
    (own := tmp_path / f"own_{abs(hash(expression))}.py").write_text(f"import torch\nmine = {expression}\n")
    with pytest.raises(RegistryError, match=rf"^[^\n]*{NOT_LOSSES[expression]}[^\n]*$"):
        check_contract(resolve("loss", f"{own}:mine"), "cpu")
