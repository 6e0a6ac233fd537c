"""Random calls of a loss, that shrink to the simplest one that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.support.fuzzing import fuzzed
from correctness.support.losses import Inputs, assert_as_accurate_as_eager, random_inputs
from impl.interpreting import requires_triton
from shardmark.registry import Implementation, Unsupported

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

TIMES = 8
"""Eager's error, where tests of fixed sizes allow twice: of many random calls, one has rounding errors that add up."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[:, ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
}


@dataclass(frozen=True)
class Call:
    """What varies; `ignored` is the word whose targets are ignored, or a number that is none."""

    tokens: int
    dim: int
    vocab: int
    dtype: torch.dtype
    ignored: int
    label_smoothing: float
    z_loss: float
    scale: float
    layouts: tuple[str, str]
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """Only those that are used, as an implementation may not have the others."""
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return {"ignore_index": self.ignored} | {name: value for name, value in options.items() if value}

    def inputs(self, device: str) -> Inputs:
        torch.manual_seed(self.seed)
        inputs = random_inputs(self.tokens, self.dim, self.vocab, device, ignored=self.ignored)
        inputs = replace(inputs, hidden=self.scale * inputs.hidden).to(self.dtype)
        hidden, weight = (LAYOUTS[how] for how in self.layouts)
        return replace(inputs, hidden=hidden(inputs.hidden), weight=weight(inputs.weight))


CALLS = st.builds(
    Call,
    tokens=st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 129, 257, 511, 513, 1025]),
    dim=st.integers(1, 20) | st.sampled_from([63, 64, 65, 129, 257]),
    vocab=st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 129, 257, 1023, 1025, 2049]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    ignored=st.sampled_from([-100, 0, -1, 1, 2**40, -(2**31) - 1]),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1.0, 0.1, 10.0]),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 2),
    seed=st.integers(0, 2**20),
)


def _try(implementation: Implementation, device: str, examples: int) -> None:
    taken = 0

    @fuzzed(examples)
    @hypothesis.given(CALLS)
    def is_as_accurate_as_eager(call: Call) -> None:
        nonlocal taken
        try:
            assert_as_accurate_as_eager(implementation.adapted, call.inputs(device), TIMES, **call.options)
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
