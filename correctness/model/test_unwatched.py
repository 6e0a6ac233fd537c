"""A model unwatched: weights and tokens drawn anew, and first calls of which half evaluate."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from impl.model import PlainTransformer
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    heads, half, vocab = (2 + torch.randint(5, (3,), generator=generator)).tolist()
    size = {"d_model": heads * half * 2, "d_ff": 37, "layers": 2, "heads": heads, "vocab": 20 + vocab}
    contexts = torch.randint(1, 70, (6,), generator=generator).tolist()
    tokens = [torch.randint(size["vocab"], (2, context), generator=generator) for context in contexts]
    return {"size": size, "seed": int(torch.randint(10**6, (), generator=generator)), "tokens": tokens}


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    from impl.model import TransformerSize

    model = target(TransformerSize(**given["size"]), context_length=70)
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(given["seed"] + sum(map(ord, name)))
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) * (0.3 if p.ndim > 1 else 1.0))
    found = {}
    for number, tokens in enumerate(given["tokens"]):
        with torch.inference_mode(number % 2 == 0):  # what a call keeps there must serve training
            first = model(tokens)
        logits = model(tokens)
        found |= {f"first logits of call {number}": first.detach().clone(), f"logits of call {number}": logits.detach()}
    logits.square().mean().backward()
    return found | {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    return perform(PlainTransformer, given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("model")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
