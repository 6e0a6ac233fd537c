"""Eager attention under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from impl.attention.accounting import eager_peak
from impl.attention.contract import check_inputs
from impl.attention.eager import eager_attention
from shardmark.api import Race, register, requires_compiler

MANY = 4096
"""Recompile limit: more than any run has shapes. Above PyTorch's own limit of 8 calls raise, or are silently eager."""


def compile_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled again for each new shape, as one graph: a training run has one shape."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        # At the first call only: importing the compiler takes as long as importing torch.
        return torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
            return compiled()(*args, **kwargs)

    return call


_compiled = compile_each_shape(eager_attention)


def compiled_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v. Shapes, dtypes and errors: `impl.attention.Attention`."""
    check_inputs(q, k, v)  # not inside the compiled function, where the compiler would raise its own error
    return _compiled(q, k, v, is_causal=is_causal)


register(
    "attention",
    "compiled",
    compiled_attention,
    memory=eager_peak,  # a limit: what the compiler plans is its own
    time=Race("eager"),
    requires=(requires_compiler,),
    called="compiled eager attention",
)
