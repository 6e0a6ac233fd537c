"""Histories of calls of a function, such as an attention or a loss, and what must not change meanwhile.

Each family's own `RunningCall` checks a call's results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from correctness.engine.histories import Problem, hold
from correctness.support.contracts import assert_unchanged
from correctness.support.default_dtype import default_dtype
from impl.interpreting import requires_triton
from shardmark.api import Implementation, Unsupported


@contextmanager
def _both(one: AbstractContextManager[object], other: AbstractContextManager[object]) -> Iterator[None]:
    with one, other:
        yield


MODES: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "gradients": lambda device: nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "nothing_requires_grad": lambda device: nullcontext(),
    "autocast to bfloat16": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device, dtype=torch.float16),
    "no_grad, autocast to bfloat16": lambda device: _both(
        torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16)
    ),
    "inference_mode, autocast to bfloat16": lambda device: _both(
        torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16)
    ),
    "default dtype bfloat16": lambda device: default_dtype(torch.bfloat16),
    "default dtype float64": lambda device: default_dtype(torch.float64),
    "what is saved moves": lambda device: torch.autograd.graph.saved_tensors_hooks(_moved, lambda x: x),
}
"""Surroundings of a call's forward. As offloading does, the last one saves contiguous copies for backward."""

WITHOUT_GRADIENTS = ("no_grad", "inference_mode", "nothing_requires_grad")
"""Beginnings of the names of modes whose results require no gradients."""

AFTER_A_CHANGE = "after a change"
IN_A_THREAD = "in a thread"
BACKWARDS = ("grad", "in its mode", "backward", "twice", AFTER_A_CHANGE, IN_A_THREAD, "never")
"""How backward runs: by `torch.autograd.grad`, outside of the call's mode or in it, or by `backward()`; twice, the
second time with other gradients; after an argument or a result has changed in place, where it may raise an error; or in
another thread, as on CUDA."""


@st.composite
def nearly_twice(draw: st.DrawFn, calls: SearchStrategy[Any], *parts: str, **cast: Any) -> list[Any]:
    """Draw a call, and it once more with one of its parts drawn anew, or with those that autocast takes, `cast`, in any
    mode: what the first one keeps may not be the second one's. A call of equal tensors is of the same ones."""
    first, other = draw(calls), draw(calls)
    part, modes = draw(st.just("mode") | st.sampled_from(parts)), st.sampled_from(list(MODES))
    if part == "mode":
        first, other = (replace(each, mode=draw(modes), **cast) for each in (first, other))
    pair = [first, replace(first, **{part: getattr(other, part)})]
    return [each for each in pair if each.is_possible] or [draw(calls)]


def _moved(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


class RunningCall:
    """A call with watched tensors: its forward has run, and perhaps its backward."""

    def __init__(self, call: Any, tensors: Mapping[str, Tensor]) -> None:
        self.call, self.tensors = call, tensors
        self.memory = {name: _memory(x) for name, x in tensors.items()}
        self.remember()
        self.waits = not call.mode.startswith(WITHOUT_GRADIENTS)
        """Arguments of its backward."""
        self.results: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        """Copies of the results, made when the call returned."""
        self._hooked: Counter[int] = Counter()
        """How often a hook on each argument has run, by position."""

    @property
    def needs_nothing(self) -> bool:
        return self.call.mode == "nothing_requires_grad"

    def remember(self) -> None:
        self.before = {name: x.clone() for name, x in self.memory.items()}

    def backward(self) -> None:
        raise NotImplementedError

    def called(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call the function; if the call is checkpointed, forward runs once more in backward. Every second call has
        hooks on its arguments."""
        for position, x in enumerate(tensors if self.call.seed & 4 else ()):
            if x.requires_grad:
                x.register_hook(lambda _, position=position: self._hooked.update([position]))
        if self.call.backward == AFTER_A_CHANGE:
            with torch.compiler.set_stance("force_eager"):  # the compiler saves views, which hide a change
                return function(*tensors)
        if not (self.call.checkpointed and self.waits):
            return function(*tensors)
        return checkpoint(function, *tensors, use_reentrant=self.call.backward == "backward")

    def complete(self) -> None:
        """Run backward; in each pass a hook on an argument sees one gradient, the whole one."""
        self._hooked.clear()
        self.backward()
        passes = 2 if self.call.backward == "twice" else 1
        for position, times in self._hooked.items():
            assert times <= passes, (
                f"of {self.call}: a hook on argument {position} has run {times} times in {passes} backward pass"
                f"{'es' * (passes > 1)}: it sees parts of the gradient, or one twice"
            )

    def mode_of_backward(self) -> AbstractContextManager[object]:
        device = next(iter(self.memory.values())).device.type
        return MODES[self.call.mode](device) if self.call.backward == "in its mode" else nullcontext()

    def run(self, gradients: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run backward, in another thread if the call asks for it."""
        if self.call.backward != IN_A_THREAD:
            return gradients()
        with ThreadPoolExecutor(1) as other:
            return other.submit(gradients).result()

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
        self.remember()
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


def _memory(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def leaves_of(call: Any, tensors: Mapping[str, Tensor], needed: Any, last: Any) -> dict[str, Tensor]:
    """The tensors as leaves, of which those that are `needed` require gradients: those that the `last` call had of the
    same tensors, if they are alike, or new ones; in inference mode half of them are made in it, as activations are."""
    if last and not last.waits and last.needed == needed and not any(x.is_inference() for x in last.leaves.values()):
        for x in last.leaves.values():
            x.grad = None
        return last.leaves
    if call.mode.startswith("inference_mode") and call.seed % 2:
        with torch.inference_mode():
            return {name: _memory(x).as_strided(x.shape, x.stride(), x.storage_offset()) for name, x in tensors.items()}
    return {name: x.detach().requires_grad_(name in needed) for name, x in tensors.items()}


def of_equal_tensors(call: Any, tensors: Mapping[str, Tensor], calls: list[Any]) -> Any:
    """Return the last call if its tensors are equal to these, so that this one has the same. Every second
    time, if none waits for its backward, they change in place, as weights do in an optimizer's step."""
    if not calls or tensors.keys() != calls[-1].tensors.keys():
        return None
    last = calls[-1]
    if AFTER_A_CHANGE in (call.backward, last.call.backward):  # one of them would change the other's
        return None
    if not all(_equal(x, last.tensors[name]) for name, x in tensors.items()):
        return None
    if call.seed & 2 and not any(each.waits for each in calls):
        overwrite(calls, lambda x: x.mul_(-0.5) if x.is_floating_point() else x)
    return last


def _equal(new: Tensor, old: Tensor) -> bool:
    alike = (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
    return alike and torch.equal(new, old)


def overwrite(calls: list[Any], write: Callable[[Tensor], object]) -> None:
    """Overwrite the inputs, as a training step reuses its buffers: results must not be views of them."""
    for each in calls:
        for x in each.memory.values():
            write(x)
    for each in calls:
        each.remember()


def look(calls: list[Any], when: str) -> None:
    for each in calls:
        each.look(when)


def play(
    events: list[Any], begin: Callable[[Any, list[Any]], RunningCall], write: Callable[[Tensor], object]
) -> list[Any]:
    """Begin each call, beside the earlier ones; run its backward at once or, for calls marked `later`, at the end in
    reverse; overwrite all inputs. Returns the calls that the implementation takes."""
    calls: list[RunningCall] = []
    for call in events:
        try:
            calls.append(begin(call, calls))
        except Unsupported:
            continue
        look(calls, "after a forward")
        if calls[-1].waits and not call.later:
            calls[-1].complete()
            look(calls, "after a backward")
        if not calls[-1].waits:
            calls[-1].spend()
            look(calls, "after results of a call were overwritten")
    for each in reversed(calls):
        if each.waits:
            each.complete()
            look(calls, "after a backward")
    overwrite(calls, write)
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
