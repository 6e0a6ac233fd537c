"""Random histories of calls of attention against eager: results are right, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.attention.accuracy import assert_accurate
from correctness.attention.events import HISTORIES, Call
from correctness.engine.calls import MODES, RunningCall, hold_calls, leaves_of, look, of_equal_tensors, play
from impl.attention import Attention
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]

TIMES = 8
"""Allowed multiple of eager's error; tests of fixed sizes allow two. Among many random calls, rounding errors add up
in some."""

NAMES = ("q", "k", "v", "the output's gradient")


class Running(RunningCall):
    def __init__(
        self, attention: Attention, call: Call, calls: list[Any], device: str, first: Running | None = None
    ) -> None:
        """Make new inputs, or use the tensors of an earlier call: of `first`, or of the last of `calls` if equal."""
        if not first:
            self.inputs = call.inputs(device)
            first = of_equal_tensors(call, dict(zip(NAMES, self.inputs, strict=True)), calls)
        if first:
            self.inputs = first.inputs
        super().__init__(call, dict(zip(NAMES, self.inputs, strict=True)))
        self.needed = needed = "" if self.needs_nothing else call.needs
        self.leaves = leaves_of(call, dict(zip("qkv", self.inputs, strict=False)), needed, first)
        with MODES[call.mode](device):
            same = dict(zip(map(id, self.inputs), self.leaves.values(), strict=False))  # shared inputs stay shared
            qkv = list(self.leaves.values()) if needed else [same[id(x)] for x in self.inputs[:3]]
            self.out = self.called(lambda *qkv: attention(*qkv, is_causal=call.is_causal), *qkv)
        self._look_at_the_output()
        self.kept = {"out": self.out.detach().clone()}
        self.results["out"] = self.out.detach()
        if not self.waits or call.backward == "never":
            self.waits = False
            del self.out

    def _look_at_the_output(self) -> None:
        call, out = self.call, self.out
        dtypes = {call.dtype, call.arithmetic}
        assert out.dtype in dtypes, f"of {call}: out is {out.dtype}, expected {' or '.join(map(str, dtypes))}"
        assert out.requires_grad == self.waits, (
            f"of {call}, for {call.needs}: out {'requires a' if out.requires_grad else 'has no'} gradient"
        )
        if call.nan is None:
            self._assert_accurate({"out": out}, self.inputs)
            return
        seen = out[..., call.nan_key if call.is_causal else 0 :, 0]
        assert seen.isnan().all(), (
            f"of {call}: out is a number for queries that attend to the NaN, however small its weight"
        )

    def _assert_accurate(self, found: dict[str, Tensor], drawn: list[Tensor], times: float = 1) -> None:
        """Check results of what was drawn, with `times` the output's gradient."""
        inputs = [*drawn[:3], times * drawn[3]]
        found = {name: x.detach().to(self.call.dtype) for name, x in found.items()}
        arithmetic, when = self.call.arithmetic, f"of {self.call}: "
        assert_accurate(found, inputs, self.call.is_causal, TIMES, when, arithmetic)

    def backward(self) -> None:
        """Run backward as the call asks; a second backward may raise an error."""
        call, needed = self.call, {name: x for name, x in self.leaves.items() if x.requires_grad}
        grad, drawn = self.inputs[3].to(self.out.dtype), copy.deepcopy(self.inputs)
        if call.backward == "backward":
            self.out.backward(grad)
            gradients = {name: x.grad for name, x in self.leaves.items()}
        else:
            gradients: dict[str, Any] = {}
            with self.mode_of_backward(), self.after_a_change(*self.leaves.values(), self.out):
                gradients = self.run(lambda: self._gradients(needed, grad, retain_graph=call.backward == "twice"))
            if not gradients:  # an error, because a tensor has changed
                self.waits = False
                return
        for name, x in self.leaves.items():
            given = gradients.get(name) is not None
            assert given == x.requires_grad, (
                f"of {call}, with gradients for {call.needs}: {name} has {'a' if given else 'no'} gradient"
            )
            assert not given or gradients[name].dtype == x.dtype, (
                f"of {call}: the gradient of {name} is {gradients[name].dtype}"
            )
        found = {f"d{name}": gradients[name] for name in needed}
        if call.nan is None:
            self._assert_accurate(found, drawn)
        if call.backward == "twice":
            for x in found.values():
                if 0 not in x.stride():  # or it is expanded
                    x.zero_()
            try:
                again = self._gradients(needed, -2 * grad)
            except RuntimeError:
                again = {}
            if call.nan is None:
                self._assert_accurate({f"d{name}": x for name, x in again.items()}, drawn, times=-2)
        self.results |= found
        self.kept |= {name: x.clone() for name, x in found.items()}
        self.waits = False
        del self.out

    def _gradients(self, needed: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Any]:
        return dict(zip(needed, torch.autograd.grad(self.out, list(needed.values()), grad, **options), strict=True))


def play_attention(attention: Attention, events: list[Call], device: str) -> list[Running]:
    """Play the events, then the first call again on its own tensors, which have been overwritten."""
    calls: list[Running] = play(events, lambda *call: Running(attention, *call, device), lambda x: x.mul_(-0.5))
    if calls and calls[0].call.shared == "none":  # overlapping layouts were scaled more than once
        Running(attention, calls[0].call, calls, device, calls[0])
        look(calls, "after a call of the first one's tensors, overwritten in place")
    return calls


@pytest.mark.examples(10, 100, 1000)
def test_any_history_of_calls_is_as_accurate_as_eager_and_changes_nothing_else(
    implementation: Implementation, examples: int, device: str
) -> None:
    hold_calls(
        HISTORIES,
        lambda events: play_attention(implementation.watched, events, device),
        implementation,
        examples,
        device,
    )
