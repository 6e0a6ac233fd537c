"""Histories of calls of a function, such as an attention or a loss, and what must not change meanwhile.

Each family's own `RunningCall` checks a call's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from correctness.engine.histories import Problem, hold
from correctness.support.contracts import assert_unchanged
from correctness.support.default_dtype import default_dtype
from impl.interpreting import requires_triton
from shardmark.api import Implementation, Unsupported

MODES: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "gradients": lambda device: nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "nothing_requires_grad": lambda device: nullcontext(),
    "autocast to bfloat16": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device, dtype=torch.float16),
    "default dtype bfloat16": lambda device: default_dtype(torch.bfloat16),
    "default dtype float64": lambda device: default_dtype(torch.float64),
    "what is saved moves": lambda device: torch.autograd.graph.saved_tensors_hooks(_moved, lambda x: x),
}
"""Surroundings of a call's forward. As offloading does, the last one saves contiguous copies for backward."""

AFTER_A_CHANGE = "after a change"
BACKWARDS = ("grad", "in its mode", "backward", "twice", AFTER_A_CHANGE, "never")
"""How backward runs: by `torch.autograd.grad`, outside of the call's mode or in it, or by `backward()`; twice, the
second time with other gradients; or after an argument or a result has changed in place, where it may raise an error."""


def _moved(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


class RunningCall:
    """A call with watched tensors: its forward has run, and perhaps its backward."""

    def __init__(self, call: Any, tensors: Mapping[str, Tensor]) -> None:
        self.call = call
        self.memory = {name: _memory(x) for name, x in tensors.items()}
        self.before = {name: x.clone() for name, x in self.memory.items()}
        self.waits = call.mode not in ("no_grad", "inference_mode", "nothing_requires_grad")
        """Arguments of its backward."""
        self.results: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        """Copies of the results, made when the call returned."""

    def backward(self) -> None:
        raise NotImplementedError

    def called(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call the function; if the call is checkpointed, forward runs once more in backward."""
        if self.call.backward == AFTER_A_CHANGE:
            with torch.compiler.set_stance("force_eager"):  # the compiler saves views, which hide a change
                return function(*tensors)
        if not (self.call.checkpointed and self.waits):
            return function(*tensors)
        return checkpoint(function, *tensors, use_reentrant=self.call.backward == "backward")

    def mode_of_backward(self) -> AbstractContextManager[object]:
        device = next(iter(self.memory.values())).device.type
        return MODES[self.call.mode](device) if self.call.backward == "in its mode" else nullcontext()

    @contextmanager
    def after_a_change(self, *changeable: Tensor) -> Iterator[None]:
        """Around backward, if the call asks for it: one of these tensors changes in place before, and a RuntimeError
        may come of it. Autograd sees a change of what `save_for_backward` has, and not of an attribute of ctx, or of a
        view that `Tensor.data` made."""
        if self.call.backward != AFTER_A_CHANGE:
            yield
            return
        try:
            with torch.no_grad():
                changeable[self.call.seed % len(changeable)].mul_(-0.5)
        except RuntimeError:  # its elements share memory, so that nothing may change
            yield
            return
        self.before = {name: x.clone() for name, x in self.memory.items()}
        self.kept = {name: x.clone() for name, x in self.results.items()}
        with suppress(RuntimeError):
            yield

    def spend(self) -> None:
        """Overwrite the results, as a caller may that adds to a loss, clips gradients or sets them to zero."""
        with torch.inference_mode():
            for x in self.results.values():
                if 0 not in x.stride():  # a zero that is expanded is a gradient, too
                    x.fill_(7)
        self.kept = {name: x.clone() for name, x in self.results.items()}

    def look(self, when: str) -> None:
        """Assert that its inputs, the memory around them and its results are unchanged."""
        assert_unchanged(self.before, self.memory, f"of {self.call}, {when}: an input, or memory beside it:")
        assert_unchanged(self.kept, self.results, f"of {self.call}, {when}: a result:")

    def overwrite(self, write: Callable[[Tensor], object]) -> None:
        """Overwrite the inputs, as a training step reuses its buffers: results must not be views of them."""
        for x in self.memory.values():
            write(x)
        self.before = {name: x.clone() for name, x in self.memory.items()}


def _memory(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def look(calls: list[Any], when: str) -> None:
    for each in calls:
        each.look(when)


def play(events: list[Any], begin: Callable[[Any], RunningCall], write: Callable[[Tensor], object]) -> list[Any]:
    """Begin each call; run its backward at once or, for calls marked `later`, at the end in reverse; overwrite all
    inputs. Returns the calls that the implementation takes."""
    calls: list[RunningCall] = []
    for call in events:
        try:
            calls.append(begin(call))
        except Unsupported:
            continue
        look(calls, "after a forward")
        if calls[-1].waits and not call.later:
            calls[-1].backward()
            look(calls, "after a backward")
        if not calls[-1].waits:
            calls[-1].spend()
            look(calls, "after results of a call were overwritten")
    for each in reversed(calls):
        if each.waits:
            each.backward()
            look(calls, "after a backward")
    for each in calls:
        each.overwrite(write)
    look(calls, "after the inputs were overwritten")
    return calls


@dataclass(frozen=True)
class History:
    events: list[Any]
    """Calls; each says how its backward runs."""

    def __str__(self) -> str:
        return ""


def hold_calls(
    calls: SearchStrategy[list[Any]],
    run: Callable[[list[Any]], list[Any]],
    implementation: Implementation,
    examples: int,
    device: str,
) -> None:
    """Play that many histories of calls, fewer in Triton's interpreter; `run(events)` returns the calls that the
    implementation takes. Skip if it takes none."""
    __tracebackhide__ = True
    taken = 0
    interpreted = device == "cpu" and requires_triton in implementation.requires

    def plays(history: History) -> Problem | None:
        nonlocal taken
        try:
            taken += len(run(history.events))
        except AssertionError as error:
            return Problem(len(history.events), str(error))
        return None

    hold(calls.map(History), plays, examples // 6 if interpreted else examples)
    if not taken:
        pytest.skip("takes none of the random calls")
