"""Calls as decoding makes them, of which none goes on from those before: the contract has no cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from correctness.model.language_models import CLOSE, SIZE, assert_logits, draw, models
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("model"), pytest.mark.usefixtures("in_float64")]


def _one_by_one(tokens: Tensor) -> list[Tensor]:
    """A prompt, and each token that follows."""
    return [tokens[:, :8], *tokens[:, 8:].split(1, dim=1)]


def _ever_longer(tokens: Tensor) -> list[Tensor]:
    """A prompt, and with each token that follows; then a shorter one, and another that ends differently."""
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % SIZE.vocab
    return [*(tokens[:, :length] for length in (8, 9, 10, 13, 5)), other[:, :8], tokens[:, 3:11]]


def _one_sequence_less(tokens: Tensor) -> list[Tensor]:
    """Sequences that have come to their end leave the batch."""
    return [tokens[:, :8], tokens[:1, :9], tokens[1:, 8:9], tokens[:1, 8:9], tokens]


ORDERS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one_by_one": _one_by_one,
    "ever_longer": _ever_longer,
    "one_sequence_less": _one_sequence_less,
}


@pytest.mark.parametrize("train", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("order", ORDERS)
def test_a_call_does_not_go_on_from_those_before(
    implementation: Implementation,
    order: str,
    context: Callable[[], AbstractContextManager[object]],
    train: bool,
    device: str,
) -> None:
    model, plain = (each.train(train) for each in models(implementation, device))
    for number, tokens in enumerate(ORDERS[order](draw(device))):
        with context():
            logits = model(tokens)
        with torch.no_grad():
            assert_logits(logits, plain(tokens), CLOSE, f" of call {number + 1}, of {tuple(tokens.shape)} tokens,")
