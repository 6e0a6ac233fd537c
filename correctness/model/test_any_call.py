"""Language models of any size, called in any order and mode, with weights that change in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.histories import hold
from correctness.model.language_models import CONTEXT, assert_logits, copy_weights, draw, models
from impl.model import TransformerSize
from shardmark.api import Implementation

pytestmark = pytest.mark.family("model")

RATIOS = [(heads, context) for heads in (1, 3, 5) for context in (1, 2, 3, 4, 6, 13)]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("heads", "context"), RATIOS, ids=lambda value: str(value))
def test_contexts_beside_heads_and_head_dim(
    implementation: Implementation, heads: int, context: int, device: str
) -> None:
    """Contexts shorter than the number of heads, equal and longer; likewise for head_dim and batch."""
    for half, (d_ff, batch) in product((1, 2), ((3, 1), (40, heads))):
        size = TransformerSize(2 * half * heads, d_ff, 1, heads, vocab=7)
        assert_as_plain(implementation, device, size, CONTEXT, context, batch)


def assert_as_plain(
    implementation: Implementation, device: str, size: TransformerSize, longest: int, context: int, batch: int
) -> None:
    model, plain = models(implementation, device, size, longest)
    tokens = draw(device, batch, context, size)
    where = f" with {size.heads} heads of {size.head_dim}, {batch} sequences of {context} tokens of up to {longest},"
    with torch.no_grad():
        assert_logits(model(tokens), plain(tokens), where=where)


@st.composite
def calls(draw: st.DrawFn) -> tuple[TransformerSize, int, int, int]:
    """Draw a model's size and longest context, and a batch's context and number of sequences."""
    heads, few = draw(st.integers(1, 6)), st.integers(1, 4)
    size = TransformerSize(2 * draw(few) * heads, draw(st.integers(1, 20)), draw(few), heads, draw(few))
    longest = draw(st.integers(1, 20))
    return size, longest, draw(st.integers(1, longest)), draw(few)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.examples(20, 100, 2000)
def test_any_size_and_any_batch(implementation: Implementation, examples: int, device: str) -> None:
    hold(calls(), lambda call: assert_as_plain(implementation, device, *call), examples)


class Mode(NamedTuple):
    """Context of a call, and the error that its logits may have."""

    context: Callable[[str], AbstractContextManager[object]]
    training: bool = True
    tolerance: float = 1e-5


BF16, F16 = torch.bfloat16, torch.float16
HALF = 16 * torch.finfo(BF16).eps


def _half(device: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device, dtype=dtype)


MODES = {
    "training": Mode(lambda device: nullcontext()),
    "evaluation": Mode(lambda device: nullcontext(), training=False),
    "no_grad": Mode(lambda device: torch.no_grad(), training=False),
    "no_grad_in_training": Mode(lambda device: torch.no_grad()),
    "inference": Mode(lambda device: torch.inference_mode(), training=False),
    "bfloat16": Mode(partial(_half, dtype=BF16), tolerance=HALF),
    "bfloat16_evaluation": Mode(partial(_half, dtype=BF16), training=False, tolerance=HALF),
    "float16": Mode(partial(_half, dtype=F16), tolerance=HALF),
}


def _called(model: nn.Module, plain: nn.Module, tokens: Tensor, mode: str, device: str, where: str) -> Tensor:
    """Compare the model's logits with the reference's, which run without autocast; return them."""
    if model.training != MODES[mode].training:  # `train` would otherwise clear what an evaluation caches
        model.train(MODES[mode].training)
    with MODES[mode].context(device):
        found = model(tokens)
    with torch.no_grad():
        assert_logits(found, plain(tokens), MODES[mode].tolerance, f" in {mode} mode, {where},")
    return found


def _shift(weight: Tensor) -> None:
    """Change a weight by more than half precision's tolerance."""
    weight.mul_(0.5).add_(0.5 * torch.randn_like(weight) * weight.std(correction=0))


@torch.no_grad()
def _in_place(model: nn.Module, plain: nn.Module) -> None:
    for p in model.parameters():
        _shift(p)
    copy_weights(model, plain)


@torch.no_grad()
def _data(model: nn.Module, plain: nn.Module) -> None:
    """Change weights through `.data`: autograd's version counters do not see it."""
    for p in model.parameters():
        _shift(p.data)
    copy_weights(model, plain)


def _loaded(model: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad():
        for p in plain.parameters():
            _shift(p)
    model.load_state_dict(model.state_dict() | plain.state_dict())


def _optimized(model: nn.Module, plain: nn.Module) -> None:
    tokens = draw(next(model.parameters()).device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(tokens).float().square().mean().backward()
    optimizer.step()
    copy_weights(model, plain)


CHANGES = {"in_place": _in_place, "data": _data, "loaded": _loaded, "optimized": _optimized}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_has_the_weights_of_now(implementation: Implementation, mode: str, change: str, device: str) -> None:
    """Call twice with the same tokens and mode: nothing cast or looked up in the first call may be reused."""
    model, plain = models(implementation, device)
    tokens = draw(device)
    _called(model, plain, tokens, mode, device, "of a first call")
    for _ in range(2):
        CHANGES[change](model, plain)
        _called(model, plain, tokens, mode, device, f"with weights {change.replace('_', ' ')} since the last call")
