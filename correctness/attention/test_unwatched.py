"""Attention unwatched: sizes drawn anew, first calls of which half evaluate, and calls after hundreds of others."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> list[dict[str, Any]]:
    calls = []
    for number in range(24):
        q_len, k_len, heads = torch.randint(1, 150, (3,), generator=generator).tolist()
        head_dim = int(torch.randint(1, 140, (), generator=generator)) if number % 2 else (16, 32, 64)[number % 3]
        shapes = [(1 + heads % 3, n, head_dim) for n in (q_len, k_len, k_len, q_len)]
        q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
        calls.append({"q": q, "k": k, "v": v, "grad": grad, "is_causal": number % 4 > 1 and q_len <= k_len})
    return calls


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
        return target.apply(q, k, v, is_causal) if is_function else target(q, k, v, is_causal=is_causal)

    found = {}
    for number, call in enumerate(given):
        qkv = [call[name].requires_grad_() for name in "qkv"]
        try:
            with torch.inference_mode(number % 2 == 0):  # what a call keeps there must serve training
                first = attention(*qkv, call["is_causal"])
            out = attention(*qkv, call["is_causal"])
        except ValueError:
            if qkv[0].shape[-1] in (16, 32, 64):
                raise
            continue  # other head dims may be refused
        gradients = torch.autograd.grad(out, qkv, call["grad"])
        names = [f"{name} of call {number}" for name in ("first", "out", "dq", "dk", "dv")]
        found |= dict(zip(names, (first.detach().clone(), out.detach(), *gradients), strict=True))
    for _ in range(600):
        out = attention(*(given[0][name].detach() for name in "qkv"), given[0]["is_causal"])
    return found | {"out after many calls": out.detach()}


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    found = {}
    for number, call in enumerate(given):
        qkv = [call[name].double().requires_grad_() for name in "qkv"]
        out = scaled_dot_product_attention(*qkv, is_causal=call["is_causal"])
        gradients = torch.autograd.grad(out, qkv, call["grad"].double())
        names = [f"{name} of call {number}" for name in ("first", "out", "dq", "dk", "dv")]
        found |= dict(zip(names, (out.detach(), out.detach(), *gradients), strict=True))
    return found | {"out after many calls": found["out of call 0"]}


def may_lack(given: Any, name: str) -> bool:
    """Other head dims may be refused."""
    number = name.rpartition(" ")[2]
    return number.isdecimal() and given[int(number)]["q"].shape[-1] not in (16, 32, 64)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("attention")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
