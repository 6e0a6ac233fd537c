"""The training step of an MLP of square linears with bias and ReLU, operator by operator as eager PyTorch does it.

    LinearsStep(case, FullySharded(ranks=2)).run().peak.entries

One step of SGD with the mean squared error, in float32; the strategy says what happens to parameters and gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Ledger
from impl.accounting.programs.parameters import FLOAT, ROOT, Parameter, Units
from impl.accounting.strategies import GRADIENTS, Strategy

if TYPE_CHECKING:
    from impl.fsdp.cases import NineLinearsCase

ACTIVATIONS, OUTPUT_GRADIENT = "activations", "gradient of a linear's output"


class LinearsStep:
    """A step that is not the first. Units are numbered from 1 on; where the root module is the only one, it is 0."""

    c, has_moments = FLOAT, False

    def __init__(self, case: NineLinearsCase, strategy: Strategy, device: str = "cpu") -> None:
        self.case, self.strategy, self.device, self.ledger = case, strategy, device, Ledger()
        self.nbytes = FLOAT * case.batch * case.width  # of the input and output of a linear
        self.linears = [_linear(case, i) for i in range(case.linears)]
        self.output = self.linears[-1][0].unit
        self.units: Units = [[] for _ in range(self.output + 1)]
        for linear in self.linears:
            self.units[linear[0].unit] += linear
        self.backward_order = [*range(self.output, ROOT, -1)]

    def unit_name(self, unit: int) -> str:
        if unit == ROOT:
            return "the root module"
        last = unit * self.case.linears_a_unit - 1
        first = last - self.case.linears_a_unit + 1
        return f"linear {last}" if first == last else f"linears {first} to {last}"

    def run(self) -> Ledger:
        """Marks "before_step", "after_forward", "after_backward" and "after_step", where gradients are left."""
        self.ledger.take("data", 2 * self.nbytes)
        self.strategy.begin(self)
        self.ledger.mark("before_step")
        self.forward()
        self.ledger.mark("after_forward")
        self.backward()
        self.ledger.mark("after_backward")
        self.strategy.finish()
        self.ledger.free("output")
        self.ledger.free("loss")
        self.ledger.mark("after_step")
        return self.ledger

    def forward(self) -> None:
        """Leaves the results of the ReLUs, the output and the loss."""
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        strategy.enter(ROOT)
        unit = ROOT
        for i, linear in enumerate(self.linears):
            if linear[0].unit != unit:
                unit = linear[0].unit
                strategy.enter(unit)
            for parameter in linear:
                strategy.read(parameter)
            take("output", self.nbytes)
            for parameter in linear:
                strategy.drop(parameter)
            if self.alone:
                strategy.leave(unit)
            if i + 1 < len(self.linears):
                take(ACTIVATIONS, self.nbytes)  # the ReLU's
                free("output")
            if not self.alone and unit != ROOT and self.last_of_unit(i):
                strategy.leave(unit)
        strategy.leave(ROOT)
        take("loss", self.nbytes)  # PyTorch's mean squared error leaves it in a storage as large as the output

    @property
    def alone(self) -> bool:
        """Whether each linear is a unit, without its ReLU."""
        return self.output != ROOT and self.case.linears_a_unit == 1

    def last_of_unit(self, i: int) -> bool:
        return (i + 1) % self.case.linears_a_unit == 0

    def backward(self) -> None:
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        take("gradient of the loss", FLOAT)
        take(OUTPUT_GRADIENT, self.nbytes)
        if self.output != ROOT:
            strategy.enter_backward(self.output)
        for i in reversed(range(len(self.linears))):
            self.linear_backward(i)
            if i == 0:
                break
            unit, before = self.linears[i][0].unit, self.linears[i - 1][0].unit
            if self.alone:
                strategy.leave_backward(unit)
            elif unit != before:
                strategy.pass_backward(unit, before)
            take(OUTPUT_GRADIENT, self.nbytes)  # of the linear before the ReLU
            free("gradient of the activations")
            free(ACTIVATIONS, self.nbytes)
            if self.alone:
                strategy.enter_backward(before)
        if self.output != ROOT:
            strategy.leave_backward(1)
        strategy.leave_backward(ROOT)
        free("gradient of the loss")

    def linear_backward(self, i: int) -> None:
        """Makes the gradients of its input and of its parameters; the first one's input, which is data, has none."""
        weight, bias = self.linears[i]
        if i > 0:
            self.strategy.read(weight)
            self.ledger.take("gradient of the activations", self.nbytes)
        self.ledger.take(GRADIENTS, FLOAT * weight.values)
        if i > 0:
            self.strategy.drop(weight)
        self.ledger.take(GRADIENTS, FLOAT * bias.values)
        self.ledger.free(OUTPUT_GRADIENT)
        self.strategy.gradient(bias)
        self.strategy.gradient(weight)


def _linear(case: NineLinearsCase, i: int) -> tuple[Parameter, Parameter]:
    unit = ROOT if case.wrap == "whole" else 1 + i // case.linears_a_unit
    weight, bias = (case.width, case.width), (case.width,)
    return Parameter(f"{i}.weight", weight, unit), Parameter(f"{i}.bias", bias, unit)
