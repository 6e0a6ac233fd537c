"""Calls of attention hold no more than they need, and leave nothing behind."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.attention.accuracy import called, random_inputs, results
from correctness.support.contracts import assert_freed_at_once, growth, held_beyond_hooks, held_by, left_by
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]


def _inputs(device: str, q_len: int, k_len: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_inputs((2, q_len, 16), (2, k_len, 16), dtype, device)


KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {},
    "grouped": {"heads": 4},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "head_dim_24": {"head_dim": 24},
    "columns_apart": {"step": 2},
    "k_alone": {"needed": "k"},
}


def _of_kind(
    length: int,
    device: str,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    step: int = 1,
    needed: str = "qkv",
) -> list[Tensor]:
    """q, k and v of that length."""
    shapes = (heads, length, step * head_dim), (2, length, step * head_dim)
    q, k, v, _ = (x[..., ::step] for x in random_inputs(*shapes, dtype, device))
    return [x.requires_grad_(name in needed) for name, x in zip("qkv", (q, k, v), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("causal", "full") else pytest.mark.judged) for kind in KINDS]
)
def test_nothing_quadratic_is_held_until_backward(implementation: Implementation, kind: str, device: str) -> None:
    """At twice the length a Function may save twice the bytes; a score matrix or a mask would take four times as
    many."""
    if not (isinstance(implementation.target, type) and issubclass(implementation.target, torch.autograd.Function)):
        pytest.skip(f"{implementation.name} is not a torch.autograd.Function, so its contract says nothing of memory")
    short, long = 256, 512
    held = {}
    for length in (short, long):
        qkv = _of_kind(length, device, **KINDS[kind])
        held[length] = held_by(partial(implementation.watched, *qkv, is_causal=kind == "causal"), device)
    scores = short * short  # bytes, at one byte per score
    found = ", ".join(f"{nbytes:,} bytes at length {length}" for length, nbytes in held.items())
    assert held[long] - 2 * held[short] < scores / 4, f"holds {found}: what it keeps for backward is quadratic"


HOW = pytest.mark.parametrize("how", ["gradients", "no_backward", "no_grad"])


@pytest.mark.long
@HOW
def test_calls_leave_nothing_behind(implementation: Implementation, how: str, device: str) -> None:
    """A backward that never comes must not be the one that frees what forward keeps."""
    inputs = _inputs(device, 48, 48)
    left = growth(lambda: called(implementation.watched, inputs, how), device)
    assert left < 1000, f"four calls, whose results are gone, leave {left:,} bytes behind"


LARGE = {  # shapes of q, and of k and v
    "causal": ((2, 160, 16), (2, 160, 16)),
    "half": ((2, 160, 16), (2, 160, 16)),
    "grouped": ((4, 160, 16), (2, 160, 16)),
    "decoding": ((64, 1, 64), (64, 300, 64)),
}


@pytest.mark.parametrize("of", ["causal", *(pytest.param(of, marks=pytest.mark.judged) for of in [*LARGE][1:])])
@HOW
def test_a_large_call_leaves_nothing_behind(implementation: Implementation, how: str, of: str, device: str) -> None:
    """A buffer that is kept for the next call does not grow with calls, and is as lost."""
    dtype, (q_shape, k_shape) = torch.bfloat16 if of == "half" else torch.float32, LARGE[of]
    small, large = _inputs(device, 16, 16, dtype), random_inputs(q_shape, k_shape, dtype, device)
    calls = [partial(called, implementation.watched, x, how, is_causal=of != "decoding") for x in (small, large)]
    left = left_by(*calls, device)
    assert left < 5000, f"a call of {q_shape} and {k_shape}, whose results are gone, leaves {left:,} bytes behind"


def test_an_output_holds_little_once_its_backward_has_run(implementation: Implementation, device: str) -> None:
    q, k, v, grad = _inputs(device, 160, 160)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call() -> Tensor:
        out = implementation.watched(*leaves)
        out.backward(grad)
        for x in leaves:
            x.grad = None
        return out

    call()
    held = held_by(call, device)
    assert held < 2 * q.nbytes, f"an output of {q.nbytes:,} bytes, whose backward has run, holds {held:,} bytes"


def test_hooks_of_saved_tensors_reach_all_that_is_saved(implementation: Implementation, device: str) -> None:
    """Checkpointing and offloading save what they do by these hooks: an attribute of ctx stays where it is."""
    q, k, v, _ = (x.requires_grad_() for x in _inputs(device, 256, 256))
    implementation.watched(q, k, v)  # what a first call keeps for good
    held, out = held_beyond_hooks(lambda: implementation.watched(*(x * 2 for x in (q, k, v))), device), q.nbytes
    assert held < out + q.nbytes, (
        f"with hooks that move what is saved for backward elsewhere, {held:,} bytes stay live between forward and "
        f"backward, of which {out:,} are the output"
    )


def test_what_a_call_saves_is_freed_without_the_collector(implementation: Implementation, device: str) -> None:
    inputs = _inputs(device, 48, 48)
    assert_freed_at_once(lambda: results(implementation.watched, inputs, is_causal=True), device)
