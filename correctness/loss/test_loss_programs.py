"""Random programs of calls of a loss, against eager: what each gives, and that nothing else changes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from correctness.support.contracts import assert_unchanged
from correctness.support.fuzzing import Patience, fuzzed
from correctness.support.loss_programs import MODES, PROGRAMS, Call
from correctness.support.losses import assert_accurate
from impl.interpreting import requires_triton
from impl.loss import Loss, linear_cross_entropy
from shardmark.registry import Implementation, Unsupported

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]

TIMES = 8
"""Eager's error, where tests of fixed sizes allow twice: of many random calls, one has rounding errors that add up."""


class Running:
    """A call that has gone forward, and perhaps backward."""

    def __init__(self, loss_of: Loss, call: Call, device: str) -> None:
        self.call, self.inputs, self.half_loss = call, call.inputs(device), loss_of is linear_cross_entropy
        tensors = {"hidden": self.inputs.hidden, "weight": self.inputs.weight, "targets": self.inputs.targets}
        self.memory = {name: _memory(x) for name, x in tensors.items()}
        self.before = {name: x.clone() for name, x in self.memory.items()}
        self.waits = call.mode not in ("no_grad", "inference_mode", "nothing_requires_grad")
        needed = call.needs if self.waits or call.mode == "no_grad" else ""
        with MODES[call.mode](device):
            leaves = [tensors[name].detach().requires_grad_(name in needed) for name in ("hidden", "weight")]
            if not needed and call.shared:
                leaves[1] = leaves[0]
            self.loss = loss_of(*leaves, self.inputs.targets, **call.options)
        self.leaves = dict(zip(("grad_hidden", "grad_weight"), leaves, strict=True))
        asked = "has no" if self.waits else "requires a"
        assert self.loss.requires_grad == self.waits, f"of {call}, for {needed or 'nothing'}: the loss {asked} gradient"
        self.results: dict[str, Tensor] = {}
        self._take({"loss": self.loss.detach()})
        if not self.waits or call.backward == "never":
            self.waits = False
            del self.loss

    def _take(self, found: dict[str, Tensor]) -> None:
        """Results that are right, and stay."""
        when, call = f"of {self.call}: ", self.call
        if not (self.inputs.targets != call.ignored).any():
            for name, x in found.items():
                assert (x == 0).all(), f"{when}{name} is {x.flatten()[:3].tolist()}, expected 0: no target counts"
        else:
            options = {"product": call.product, "half_loss": self.half_loss}
            assert_accurate(found, self.inputs, TIMES, when, **options, **call.options)
        self.results |= found
        self.kept = {name: x.clone() for name, x in self.results.items()}

    def backward(self) -> None:
        """As the call asks; twice may be an error."""
        call, scaled = self.call, self.loss * self.inputs.grad
        needed = {name: x for name, x in self.leaves.items() if x.requires_grad}
        if call.backward == "backward":
            scaled.backward()
            found = {name: x.grad for name, x in self.leaves.items()}
            for name, x in self.leaves.items():
                given = "no gradient" if found[name] is None else "a gradient"
                assert (found[name] is not None) == x.requires_grad, f"of {call}, for {call.needs}: {name} is {given}"
            found = {name: found[name] for name in needed}
        else:
            found = self._gradients(scaled, needed, retain_graph=call.backward == "twice")
        self._take(found)
        if call.backward == "twice":
            try:
                again = self._gradients(scaled, needed)
            except RuntimeError:
                again = {}
            self._take(again)
        self.waits = False
        del self.loss

    @staticmethod
    def _gradients(loss: Tensor, needed: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        return dict(zip(needed, torch.autograd.grad(loss, list(needed.values()), **options), strict=True))

    def look(self, when: str) -> None:
        """Neither its inputs, nor the memory around them, nor its results have changed."""
        assert_unchanged(self.before, self.memory, f"of {self.call}, {when}: an input, or memory beside it:")
        assert_unchanged(self.kept, self.results, f"of {self.call}, {when}: a result:")

    def overwrite(self) -> None:
        """The inputs, as a training step does with its buffers: results are not views of them."""
        for x in self.memory.values():
            x.zero_()
        self.before = {name: x.clone() for name, x in self.memory.items()}


def _memory(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def play(loss_of: Loss, program: list[Call], device: str) -> int:
    """How many of its calls the loss takes."""
    calls: list[Running] = []

    def look(when: str) -> None:
        for each in calls:
            each.look(when)

    for call in program:
        try:
            calls.append(Running(loss_of, call, device))
        except Unsupported:
            continue
        look("after a forward")
        if calls[-1].waits and not call.later:
            calls[-1].backward()
            look("after a backward")
    for each in reversed(calls):
        if each.waits:
            each.backward()
            look("after a backward")
    for each in calls:
        each.overwrite()
    look("after the inputs were overwritten")
    return len(calls)


@pytest.mark.examples(10, 100, 1000)
def test_random_programs_are_as_accurate_as_eager_and_change_nothing_else(
    implementation: Implementation, examples: int, device: str
) -> None:
    taken = 0
    interpreted = device == "cpu" and requires_triton in implementation.requires

    patience = Patience(examples)

    @fuzzed(examples // 6 if interpreted else examples)
    @given(PROGRAMS)
    def holds(program: list[Call]) -> None:
        nonlocal taken
        with patience:
            taken += play(implementation.adapted, program, device)

    patience.with_(holds)
    if not taken:
        pytest.skip("takes none of the random calls")
