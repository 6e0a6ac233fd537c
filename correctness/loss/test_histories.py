"""Random histories of calls of a loss against eager: results are right, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.engine.calls import MODES, RunningCall, hold_calls, leaves_of, of_equal_tensors, play
from correctness.loss.accuracy import assert_accurate
from correctness.loss.events import HISTORIES, Call
from impl.loss import Loss, linear_cross_entropy
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

TIMES = 8
"""Allowed multiple of eager's error; tests of fixed sizes allow two. Among many random calls, rounding errors add up
in some."""


class Running(RunningCall):
    def __init__(self, loss_of: Loss, call: Call, calls: list[Any], device: str) -> None:
        """Make new inputs, or use the tensors of the last of `calls` if equal."""
        self.half_loss = inspect.unwrap(loss_of) is linear_cross_entropy
        self.inputs = call.inputs(device)
        tensors = {name: getattr(self.inputs, name) for name in ("hidden", "weight", "targets")}
        if last := of_equal_tensors(call, tensors, calls):
            tensors = last.tensors
            self.inputs = replace(self.inputs, **tensors)
        super().__init__(call, tensors)
        self.needed = needed = "" if self.needs_nothing else call.needs
        self.leaves = leaves_of(call, {name: tensors[name] for name in ("hidden", "weight")}, needed, last)
        if not needed and call.shared:
            self.leaves["weight"] = self.leaves["hidden"]
        with MODES[call.mode](device):
            self.loss = self.called(lambda *x: loss_of(*x, self.inputs.targets, **call.options), *self.leaves.values())
        asked = "has no" if self.waits else "requires a"
        assert self.loss.requires_grad == self.waits, f"of {call}, for {needed or 'nothing'}: the loss {asked} gradient"
        self._take({"loss": self.loss.detach()})
        if not self.waits or call.backward == "never":
            self.waits = False
            del self.loss

    def _take(self, found: dict[str, Tensor], times: float = 1) -> None:
        """Check the results, gradients of `times` the loss, and keep copies that must stay equal."""
        when, call = f"of {self.call}: ", self.call
        if not (self.inputs.targets != call.ignored).any():
            for name, x in found.items():
                assert (x == 0).all(), f"{when}{name} is {x.flatten()[:3].tolist()}, expected 0: no target counts"
        else:
            options = {"product": call.product, "half_loss": self.half_loss}
            inputs = replace(self.inputs, grad=times * self.inputs.grad)
            assert_accurate(found, inputs, TIMES, when, **options, **call.options)
        self.results |= found
        self.kept = {name: x.clone() for name, x in self.results.items()}

    def backward(self) -> None:
        """Run backward as the call asks; a second backward may raise an error."""
        call, scaled = self.call, self.loss * self.inputs.grad
        needed = {name: x for name, x in self.leaves.items() if x.requires_grad}
        if call.backward == "backward":
            scaled.backward()
            for name, x in self.leaves.items():
                given = "no gradient" if x.grad is None else "a gradient"
                assert (x.grad is not None) == x.requires_grad, f"of {call}, for {call.needs}: {name} has {given}"
            found = {f"grad_{name}": x.grad for name, x in needed.items()}
        else:
            self.inputs, found = copy.deepcopy(self.inputs), {}  # as drawn, if a leaf changes
            with self.mode_of_backward(), self.after_a_change(*self.leaves.values(), self.loss):
                found = self.run(lambda: self._gradients(scaled, needed, retain_graph=call.backward == "twice"))
        self._take(found)
        if call.backward == "twice":
            for x in found.values():
                if 0 not in x.stride():  # or it is expanded
                    x.zero_()
            self._take({})
            try:
                again = self._gradients(-2 * scaled, needed)
            except RuntimeError:
                again = {}
            self._take(again, times=-2)
        self.waits = False
        del self.loss

    @staticmethod
    def _gradients(loss: Tensor, needed: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        given = torch.autograd.grad(loss, list(needed.values()), **options)
        return {f"grad_{name}": x for name, x in zip(needed, given, strict=True)}


@pytest.mark.examples(10, 100, 1000)
def test_any_history_of_calls_is_as_accurate_as_eager_and_changes_nothing_else(
    implementation: Implementation, examples: int, device: str
) -> None:
    def run(events: list[Call]) -> list[Running]:
        return play(events, lambda *call: Running(implementation.watched, *call, device), torch.Tensor.zero_)

    hold_calls(HISTORIES, run, implementation, examples, device)
