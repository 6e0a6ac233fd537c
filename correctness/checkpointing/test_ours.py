"""Our own policies beyond their contract: error messages, recomputed operators, other models, compilation."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from correctness.checkpointing.models import SIZE, Dropping, Policy, assert_same_bits, gradients, transformer
from impl.attention import FlashAttentionPyTorch, as_attention, sdpa
from impl.checkpointing import every, full, none, recursive, segments, selective
from impl.model import Transformer
from shardmark.api.finding import RegistryError
from shardmark.api.registry import check_contract, family, resolve
from shardmark.meter.memory import meter


@pytest.fixture
def tokens(device: str) -> Tensor:
    return torch.randint(SIZE.vocab, (2, 13), device=device)


class Adding(Dropping):
    """A model that adds between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("policy", [full, every(2), selective])
def test_what_a_model_does_between_blocks_is_left_alone(policy: Policy) -> None:
    x, model = torch.randn(6, 8), Adding().eval()
    expected = gradients(model, x)
    model.zero_grad()
    assert_same_bits(gradients(policy(model), x), expected)


@pytest.mark.parametrize("policy", [segments, recursive])
def test_a_model_that_does_something_between_blocks_that_run_together_is_one_line(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"^this checkpointing runs several blocks together[^\n]+$"):
        policy(Adding())(torch.randn(6, 8))


@pytest.mark.parametrize("policy", [none, full, every(2), segments, recursive, selective])
def test_the_class_names_that_are_shown_stay(policy: Policy, device: str) -> None:
    plain, model = transformer(device), policy(transformer(device))
    assert repr(model) == repr(plain)
    assert [type(part).__name__ for part in model.modules()] == [type(part).__name__ for part in plain.modules()]


@pytest.mark.parametrize("n", [0, 1.5, "2"])
def test_no_whole_number_of_blocks_is_one_line(n: Any) -> None:
    with pytest.raises(ValueError, match=rf"^every n-th block is checkpointed, with n from 1 on, got {n!r}$"):
        every(n)
    with pytest.raises(ValueError, match=rf"^a segment has a whole number of blocks, from 1 on, got {n!r}$"):
        segments(transformer("cpu"), length=n)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("policy = 3", "3 is not callable; a policy is policy(model) -> model"),
        ("def policy(model): pass", "it does not return the model that it was given"),
        (
            "import torch\ndef policy(model):\n"
            "    model.blocks = torch.nn.ModuleList(map(torch.nn.Sequential, model.blocks))\n    return model",
            "it changes the names in the model's state_dict or the classes of its blocks",
        ),
    ],
)
def test_what_is_not_a_policy_is_told_so(source: str, complaint: str, tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    entry = resolve("checkpointing", f"{path}:policy")
    with pytest.raises(RegistryError, match=f"^[^\n]+{re.escape(complaint)}$"):
        check_contract(entry, "cpu")


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[function.overloadpacket] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_selective_computes_no_product_and_no_attention_again_and_all_the_rest(
    attention: str, tokens: Tensor, device: str
) -> None:
    def calls(policy: Policy) -> Counter[Any]:
        target = family("attention").implementations[attention].target
        model = policy(Transformer(SIZE, context_length=16, attention=target).to(device))
        with Calls() as counted:
            gradients(model, tokens)
        return counted.of

    aten = torch.ops.aten
    everything, kept = calls(none), calls(selective)
    products = [op for op in everything if any(part in str(op) for part in ("mm", "attention"))]
    assert aten.mm in products and len(products) == (3 if attention == "sdpa" else 2)
    assert all(kept[op] == everything[op] for op in products)
    assert (everything[aten.silu], kept[aten.silu]) == (SIZE.layers, 2 * SIZE.layers)
    assert kept[aten.rsqrt] == everything[aten.rsqrt] + 2 * SIZE.layers


def test_selective_keeps_no_tile_of_an_autograd_function() -> None:
    """Products inside a Function are tiles: to save each would take memory quadratic in the context."""

    def kept(attention: Any) -> int:
        size = replace(SIZE, layers=1)
        with meter("cpu") as memory:
            model = selective(Transformer(size, context_length=600, attention=as_attention(attention)))
            tokens = torch.zeros(1, 600, dtype=torch.int64)
            memory.mark("before")
            logits = model(tokens)
            memory.mark("after")
        assert logits.requires_grad
        return memory.phases["after"] - memory.phases["before"]

    assert kept(FlashAttentionPyTorch) < kept(sdpa)


@pytest.mark.sweep
@pytest.mark.parametrize("policy", [none, full, every(2), segments, recursive, selective])
def test_traced_in_one_graph_gradients_are_those_without(policy: Policy, tokens: Tensor, device: str) -> None:
    expected = gradients(transformer(device), tokens)
    model = policy(transformer(device))
    torch.compile(model, backend="aot_eager", fullgraph=True)(tokens).float().square().mean().backward()
    for parameter, theirs in zip(model.parameters(), expected.values(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-6)
