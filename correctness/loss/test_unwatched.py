"""A loss unwatched: sizes drawn anew, first calls of which half evaluate, and calls after hundreds of others."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> list[dict[str, Any]]:
    calls = []
    for _ in range(24):
        tokens, dim, vocab = torch.randint(2, 180, (3,), generator=generator).tolist()
        targets = torch.randint(vocab, (tokens,), generator=generator)
        targets[1::4] = -100
        hidden = torch.randn(tokens, dim, generator=generator)
        weight = torch.randn(vocab, dim, generator=generator) / dim**0.5
        calls.append({"hidden": hidden, "weight": weight, "targets": targets})
    return calls


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    found = {}
    for number, call in enumerate(given):
        hidden, weight = call["hidden"].requires_grad_(), call["weight"].requires_grad_()
        with torch.inference_mode(number % 2 == 0):  # what a call keeps there must serve training
            first = target(hidden, weight, call["targets"])
        loss = target(hidden, weight, call["targets"])
        gradients = torch.autograd.grad(3 * loss, (hidden, weight))
        names = [f"{name} of call {number}" for name in ("first loss", "loss", "grad_hidden", "grad_weight")]
        found |= dict(zip(names, (first.detach().clone(), loss.detach(), *gradients), strict=True))
    for _ in range(600):
        loss = target(given[0]["hidden"].detach(), given[0]["weight"].detach(), given[0]["targets"])
    return found | {"loss after many calls": loss.detach()}


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    found = {}
    for number, call in enumerate(given):
        hidden, weight = (call[name].double().requires_grad_() for name in ("hidden", "weight"))
        loss = cross_entropy(hidden @ weight.T, call["targets"])
        gradients = torch.autograd.grad(3 * loss, (hidden, weight))
        names = [f"{name} of call {number}" for name in ("first loss", "loss", "grad_hidden", "grad_weight")]
        found |= dict(zip(names, (loss.detach(), loss.detach(), *gradients), strict=True))
    return found | {"loss after many calls": found["loss of call 0"]}


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("loss")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
