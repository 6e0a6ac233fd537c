"""Language models of any size, called with tokens of any shape, beside other calls and other models."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import product

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.histories import hold
from correctness.model.language_models import CLOSE, CONTEXT, SIZE, assert_logits, draw, models
from impl.model import TransformerSize
from shardmark.api import Implementation

pytestmark = pytest.mark.family("model")

float64 = pytest.mark.usefixtures("in_float64")

ROUNDED = 0.1
"""Relative error of logits in bfloat16: many times what rounding gives."""

RATIOS = [(heads, context) for heads in (1, 3, 5) for context in (1, 2, 3, 4, 6, 13)]


@float64
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


@float64
@pytest.mark.examples(20, 100, 2000)
def test_any_size_and_any_batch(implementation: Implementation, examples: int, device: str) -> None:
    hold(calls(), lambda call: assert_as_plain(implementation, device, *call), examples)


@float64
@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
def test_calls_of_other_shapes(implementation: Implementation, mode: str, device: str) -> None:
    """The tokens of each call are a slice of a longer batch, so they are not contiguous."""
    model, plain = models(implementation, device)
    model.train(mode == "training")
    with torch.inference_mode(mode == "inference"):
        for batch, context in ((2, 5), (1, 13), (3, CONTEXT), (2, 1), (2, 5)):
            tokens = draw(device, batch, CONTEXT + 1)[:, :context]
            where = f" of tokens ({batch}, {context}), after other shapes,"
            assert_logits(model(tokens), plain(tokens.contiguous()), where=where)
    tokens = draw(device)
    model(tokens).sum().backward()  # uses whatever earlier calls left behind


@float64
def test_two_models_side_by_side(implementation: Implementation, device: str) -> None:
    """Two models with different sizes, so that cached tables cannot be shared."""
    sizes = SIZE, TransformerSize(d_model=12, d_ff=20, layers=2, heads=3, vocab=50)
    pairs = [models(implementation, device, size) for size in sizes]
    tokens = draw(device)
    for _ in range(2):
        for i, (model, plain) in enumerate(pairs, 1):
            assert_logits(model(tokens), plain(tokens), where=f" of model {i} of two")


@float64
@pytest.mark.parametrize("backwards", ["as_one", "in_turn"])
def test_two_forwards_before_either_backward(implementation: Implementation, backwards: str, device: str) -> None:
    """As one, the last forward's graph runs first; in turn, the first one's."""
    model, plain = models(implementation, device)
    inputs = [draw(device), draw(device)]
    found = [model(tokens) for tokens in inputs]
    for i, tokens in enumerate(inputs, 1):
        assert_logits(found[i - 1], plain(tokens), where=f" of call {i} of two")
    losses = [found[0].square().sum(), 2 * found[1].square().sum()]
    for loss in [losses[0] + losses[1]] if backwards == "as_one" else losses:
        loss.backward()
    (plain(inputs[0]).square().sum() + 2 * plain(inputs[1]).square().sum()).backward()
    for name, p in plain.named_parameters():
        error = (model.get_parameter(name).grad - p.grad).norm() / p.grad.norm()
        assert error < CLOSE, f"after two calls the gradient of {name} has a relative error of {error.item():.2g}"


PAIRS = {  # of weights that are scaled against each other, and so the activations between them
    "scores": ("attention.query", "attention.key"),
    "values": ("attention.value", "attention.output"),
    "gates": ("feed_forward.w1", "feed_forward.w2"),
    "products": ("feed_forward.w3", "feed_forward.w2"),
}


@float64
@pytest.mark.parametrize("size", [2.0**20, 2.0**-40], ids=["large", "small"])
def test_activations_that_float16_lacks_are_those_of_bfloat16(
    implementation: Implementation, size: float, device: str
) -> None:
    """A kernel of float16 gives infinities for activations above 65,504 and zeros for the smallest."""
    tokens = draw(device)
    for what, (one, other) in PAIRS.items():
        model, plain = models(implementation, device)
        with torch.no_grad():
            for name, p in [*model.named_parameters(), *plain.named_parameters()]:
                p.mul_(size if one in name else 1 / size if other in name else 1)
            logits = model.to(torch.bfloat16)(tokens)
            assert_logits(logits, plain.bfloat16().double()(tokens), ROUNDED, f" of {what} of {size:g} in bfloat16")


@float64
def test_a_second_backward_pass_is_right_or_an_error(implementation: Implementation, device: str) -> None:
    model, plain = models(implementation, device)
    tokens = draw(device)
    loss, weights = model(tokens).square().sum(), [*model.parameters()]
    wanted = 3 * plain(tokens).square().sum()
    with suppress(RuntimeError):
        for x in torch.autograd.grad(loss, weights, retain_graph=True):
            x.zero_()
        _assert_gradients(model, torch.autograd.grad(3 * loss, weights), plain, wanted)


@float64
def test_a_backward_after_a_weight_has_changed_is_right_or_an_error(
    implementation: Implementation, device: str
) -> None:
    """Each kind of weight alone, as autograd's error for one hides that another is no error. The compiler's views hide
    a change: it is left out."""
    model, plain = models(implementation, device)
    tokens = draw(device)
    wanted = plain(tokens).square().sum()
    for name, p in model.named_parameters():
        if not name.startswith(("blocks.0.", "blocks.1.")):
            with torch.compiler.set_stance("force_eager"):
                loss = model(tokens).square().sum()
            before = p.detach().clone()
            with torch.no_grad():
                p.mul_(-0.5)
            with suppress(RuntimeError):
                given = torch.autograd.grad(loss, [*model.parameters()])
                _assert_gradients(model, given, plain, wanted, f", after {name} has changed,")
            with torch.no_grad():
                p.copy_(before)


@float64
def test_a_second_derivative_is_right_or_an_error(implementation: Implementation, device: str) -> None:
    model, plain = models(implementation, device)
    tokens, penalties = draw(device), []
    for each in (model, plain):
        loss = each(tokens).square().mean()
        gradients = torch.autograd.grad(loss, [*each.parameters()], create_graph=True)
        penalties.append(loss + sum(x.square().sum() for x in gradients))
    with suppress(RuntimeError):
        penalties[0].backward()  # for some leaves alone `once_differentiable` raises no error
        _assert_gradients(model, [p.grad for p in model.parameters()], plain, penalties[1], " differentiated twice")


def _assert_gradients(
    model: nn.Module, found: Sequence[Tensor | None], plain: nn.Module, wanted: Tensor, what: str = ""
) -> None:
    given = dict(zip((name for name, _ in model.named_parameters()), found, strict=True))
    gradients = torch.autograd.grad(wanted, [*plain.parameters()], retain_graph=True)
    for (name, _), of_plain in zip(plain.named_parameters(), gradients, strict=True):
        x = given[name]
        assert x is not None, f"{name} has no gradient{what}"
        error = ((x - of_plain).norm() / of_plain.norm()).item()
        assert error < CLOSE, f"the gradient of {name}{what} has a relative error of {error:.2g}"


PRECISIONS = {  # dtypes of the parameters and of autocast
    "float64": (torch.float64, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("how", PRECISIONS)
def test_gradients_of_two_batches_add_up_in_every_dtype(implementation: Implementation, how: str, device: str) -> None:
    """Each parameter's error is at most four times the plain model's own in that dtype, or one rounding where that is
    exact by luck."""
    dtype, to = PRECISIONS[how]
    model, plain = (each.to(dtype) for each in models(implementation, device))
    exact = copy.deepcopy(plain).double()
    for _ in range(2):
        tokens, weights = draw(device), torch.randn(2, 13, SIZE.vocab, device=device)
        for each in (model, plain, exact):
            with torch.autocast(device, dtype=to, enabled=to is not None and each is not exact):
                logits = each(tokens)
            (logits.double() * weights).sum().backward()
    for name, p in exact.named_parameters():
        found, of_plain = (each.get_parameter(name).grad for each in (model, plain))
        assert found is not None, f"{name} has no gradient"
        error, allowed = ((x.double() - p.grad).norm() / p.grad.norm() for x in (found, of_plain))
        allowed = max(CLOSE, 4 * allowed.item(), torch.finfo(to or dtype).eps)
        assert error <= allowed, (
            f"in {how} the gradient of {name}, of two batches, has a relative error of {error.item():.2g}, "
            f"allowed {allowed:.2g}"
        )
