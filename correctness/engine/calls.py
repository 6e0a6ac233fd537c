"""Programs of calls of a function, such as an attention or a loss: what is done with them, and what must not change.

What a call gives, its family's own `RunningCall` looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from correctness.engine.examples import Patience, fuzzed
from correctness.support.contracts import assert_unchanged
from impl.interpreting import requires_triton
from shardmark.api import Implementation, Unsupported

MODES: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "gradients": lambda device: nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "nothing_requires_grad": lambda device: nullcontext(),
    "autocast to bfloat16": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device, dtype=torch.float16),
}


class RunningCall:
    """A call whose tensors are watched: it has gone forward, and perhaps backward."""

    def __init__(self, call: Any, tensors: Mapping[str, Tensor]) -> None:
        self.call = call
        self.memory = {name: _memory(x) for name, x in tensors.items()}
        self.before = {name: x.clone() for name, x in self.memory.items()}
        self.waits = call.mode not in ("no_grad", "inference_mode", "nothing_requires_grad")
        """For its backward."""
        self.results: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        """What the results were when the call gave them."""

    def backward(self) -> None:
        raise NotImplementedError

    def look(self, when: str) -> None:
        """Neither its inputs, nor the memory around them, nor its results have changed."""
        assert_unchanged(self.before, self.memory, f"of {self.call}, {when}: an input, or memory beside it:")
        assert_unchanged(self.kept, self.results, f"of {self.call}, {when}: a result:")

    def overwrite(self, write: Callable[[Tensor], object]) -> None:
        """Its inputs, as a training step does with its buffers: results are not views of them."""
        for x in self.memory.values():
            write(x)
        self.before = {name: x.clone() for name, x in self.memory.items()}


def _memory(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def look(calls: list[Any], when: str) -> None:
    for each in calls:
        each.look(when)


def play(program: list[Any], begin: Callable[[Any], RunningCall], write: Callable[[Tensor], object]) -> list[Any]:
    """Begin each call, go back through it at once or, of those that come `later`, in reverse, and overwrite all inputs.

    Returns the calls that the implementation takes.
    """
    calls: list[RunningCall] = []
    for call in program:
        try:
            calls.append(begin(call))
        except Unsupported:
            continue
        look(calls, "after a forward")
        if calls[-1].waits and not call.later:
            calls[-1].backward()
            look(calls, "after a backward")
    for each in reversed(calls):
        if each.waits:
            each.backward()
            look(calls, "after a backward")
    for each in calls:
        each.overwrite(write)
    look(calls, "after the inputs were overwritten")
    return calls


def hold(
    programs: SearchStrategy[list[Any]],
    played: Callable[[list[Any]], list[Any]],
    implementation: Implementation,
    examples: int,
    device: str,
) -> None:
    """Play so many of the programs; fewer in Triton's interpreter. Skips where none of their calls is taken."""
    taken = 0
    interpreted = device == "cpu" and requires_triton in implementation.requires
    patience = Patience(examples)

    @fuzzed(examples // 6 if interpreted else examples)
    @given(programs)
    def holds(program: list[Any]) -> None:
        nonlocal taken
        with patience:
            taken += len(played(program))

    patience.with_(holds)
    if not taken:
        pytest.skip("takes none of the random calls")
