"""Calls of a language model are independent: any shape, any mode, beside other calls and other models."""

import pytest
import torch

from correctness.model.language_models import CLOSE, CONTEXT, SIZE, assert_logits, draw, models
from impl.model import TransformerSize
from shardmark.api import Implementation

pytestmark = pytest.mark.family("model")

float64 = pytest.mark.usefixtures("in_float64")


@float64
@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
def test_calls_of_other_shapes(implementation: Implementation, mode: str, device: str) -> None:
    model, plain = models(implementation, device)
    model.train(mode == "training")
    with torch.inference_mode(mode == "inference"):
        for shape in ((2, 5), (1, 13), (3, CONTEXT), (2, 1), (2, 5)):
            tokens = draw(device, *shape)
            assert_logits(model(tokens), plain(tokens), where=f" of tokens {shape}, after other shapes,")
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
def test_two_forwards_before_either_backward(implementation: Implementation, device: str) -> None:
    model, plain = models(implementation, device)
    inputs = [draw(device), draw(device)]
    found = [model(tokens) for tokens in inputs]
    for i, tokens in enumerate(inputs, 1):
        assert_logits(found[i - 1], plain(tokens), where=f" of call {i} of two")
    (found[0].square().sum() + 2 * found[1].square().sum()).backward()
    (plain(inputs[0]).square().sum() + 2 * plain(inputs[1]).square().sum()).backward()
    for name, p in plain.named_parameters():
        error = (model.get_parameter(name).grad - p.grad).norm() / p.grad.norm()
        assert error < CLOSE, f"after two calls the gradient of {name} has a relative error of {error.item():.2g}"


@float64
def test_tokens_may_be_a_slice(implementation: Implementation, device: str) -> None:
    """A slice of a longer batch is not contiguous."""
    model, plain = models(implementation, device)
    tokens = draw(device)
    assert_logits(model(tokens[:, :-1]), plain(tokens[:, :-1].contiguous()), where=" of a slice of tokens")


@float64
def test_training_mode_changes_nothing(implementation: Implementation, device: str) -> None:
    model, _ = models(implementation, device)
    tokens = draw(device)
    assert_logits(model.train()(tokens), model.eval()(tokens), 1e-9, " in training mode, against evaluation's,")


@float64
def test_tokens_stay_as_they_are(implementation: Implementation, device: str) -> None:
    model, _ = models(implementation, device)
    tokens = torch.arange(SIZE.vocab - CONTEXT, SIZE.vocab, device=device)[None]
    before = tokens.clone()
    model(tokens).sum().backward()
    assert torch.equal(tokens, before), "a call has changed its tokens"
