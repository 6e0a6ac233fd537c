"""Random calls of attention, that shrink to the simplest one that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.support.accuracy import assert_as_accurate_as_eager, random_inputs
from correctness.support.fuzzing import fuzzed
from impl.interpreting import requires_triton
from shardmark.registry import Implementation, Unsupported

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]

TIMES = 8
"""Eager's error, where tests of fixed sizes allow twice: of many random calls, one has rounding errors that add up."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads_inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else x,
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
    "one_for_all_sequences": lambda x: x[:1].expand_as(x) if x.ndim > 2 else x,
}

LENGTHS = st.integers(1, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129])


@dataclass(frozen=True)
class Call:
    """What varies; the last of `leading` are the heads of k, of which q has `group` times as many."""

    leading: tuple[int, ...]
    group: int
    q_len: int
    k_len: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    is_causal: bool
    layouts: tuple[str, ...]
    seed: int

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v, and the output's gradient."""
        torch.manual_seed(self.seed)
        q_leading = (*self.leading[:-1], self.leading[-1] * self.group) if self.leading else ()
        shapes = (*q_leading, self.q_len, self.head_dim), (*self.leading, self.k_len, self.head_dim)
        q, k, v, grad = random_inputs(*shapes, torch.float32, device)
        inputs = (x.to(self.dtype) for x in (self.scale * q, self.scale * k, v, grad))
        return [LAYOUTS[layout](x) for layout, x in zip(self.layouts, inputs, strict=True)]


CALLS = st.builds(
    Call,
    leading=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    group=st.integers(1, 3),
    q_len=LENGTHS,
    k_len=LENGTHS,
    head_dim=st.sampled_from([16, 8, 32, 64, 1, 3, 24, 40, 72, 128, 136, 192, 256]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 0.1, 5.0]),
    is_causal=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4),
    seed=st.integers(0, 2**20),
)


def _try(implementation: Implementation, device: str, examples: int) -> None:
    taken = 0

    @fuzzed(examples)
    @hypothesis.given(CALLS)
    def is_as_accurate_as_eager(call: Call) -> None:
        nonlocal taken
        try:
            assert_as_accurate_as_eager(implementation.adapted, call.inputs(device), call.is_causal, TIMES)
        except Unsupported:
            return
        taken += 1

    is_as_accurate_as_eager()
    if not taken:
        pytest.skip("takes none of the random calls")


@pytest.mark.examples(30, 150, 1000)
def test_random_calls_are_as_accurate_as_eager(implementation: Implementation, examples: int, device: str) -> None:
    interpreted = device == "cpu" and requires_triton in implementation.requires
    _try(implementation, device, examples // 5 if interpreted else examples)
