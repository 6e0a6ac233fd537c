"""Layers unwatched: sizes drawn anew, first calls of which half evaluate, and calls after hundreds of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> list[dict[str, Any]]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    calls = []
    for _ in range(12):
        rows, dim = torch.randint(2, 180, (2,), generator=generator).tolist()
        x, residual, weight = drawn(rows, dim), drawn(rows, dim), drawn(dim)
        weight[4::8] = 0
        heads = drawn(2, 3, rows, 2 * dim), drawn(2, 1, rows, 2 * dim)
        angles = 3 * drawn(rows, dim)
        calls += [
            {"name": "rms_norm", "tensors": [x, weight], "eps": 1e-3},
            {"name": "add_rms_norm", "tensors": [x, residual, weight], "eps": 1e-3},
            {"name": "swiglu", "tensors": [x, residual]},
            {"name": "rotary", "tensors": [*heads, angles.cos(), angles.sin()]},
        ]
    return calls


def perform(target: Any, given: Any, rank: int) -> dict[str, torch.Tensor]:
    owner = target() if isinstance(target, type) else target
    found = {}
    for number, call in enumerate(given):
        function = getattr(owner, call["name"], None)
        if function is None:
            continue
        options = {"eps": call["eps"]} if "eps" in call else {}
        learned = [x.requires_grad_() for x in call["tensors"][: 2 if call["name"] == "rotary" else None]]
        with torch.inference_mode(number // 4 % 2 == 0):  # what a call keeps there must serve training
            first = function(*call["tensors"], **options)
        results = function(*call["tensors"], **options)
        first, results = ([x] if isinstance(x, torch.Tensor) else [*x] for x in (first, results))
        gradients = torch.autograd.grad([3 * x.square().sum() for x in results], learned)
        named = [(f"result {i}", x.detach()) for i, x in enumerate(results)]
        named += [(f"first result {i}", x.detach().clone()) for i, x in enumerate(first)]
        named += [(f"gradient {i}", x) for i, x in enumerate(gradients)]
        found |= {f"{name} of {call['name']}, call {number}": x for name, x in named}
        for _ in range(20):
            function(*(x.detach() for x in call["tensors"]), **options)
    assert found, "it has none of the functions"
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    from impl.layers import EagerLayers

    wide = [call | {"tensors": [x.detach().double() for x in call["tensors"]]} for call in given]
    return perform(EagerLayers, wide, 0)


def may_lack(given: Any, name: str) -> bool:
    """An operation may be missing; `perform` sees that not all are."""
    return True


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("layers")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
