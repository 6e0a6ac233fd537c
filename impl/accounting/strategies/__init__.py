"""What a way of training adds at each moment of a model's step: before and after a unit, where a parameter is read, and
where its gradient is there. `impl.accounting.programs` says what the model itself does.

    TransformerStep(case, Bucketed()).run().peak.entries
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from impl.accounting.programs.parameters import FLOAT, Parameter, Units, values

if TYPE_CHECKING:
    from impl.accounting.ledger import Bytes, Ledger

PARAMETERS, GRADIENTS = "parameters", "gradients"
STATE, COUNTS = "exp_avg and exp_avg_sq", "AdamW's step counts"


class Step(Protocol):
    """What a strategy knows of its program. Units are numbered in forward's order, and the root module is 0."""

    ledger: Ledger
    units: Units
    c: int
    """Bytes of a value that the model computes with."""
    output: int
    """The unit that makes the model's output."""
    backward_order: list[int]
    """The units whose parameters backward reads."""
    has_moments: bool
    """Whether the optimizer is AdamW; or else SGD, which has no state."""
    device: str

    def unit_name(self, unit: int) -> str: ...


class Strategy:
    """One device, or gradients that are all-reduced in place: parameters, gradients and AdamW's state are all here."""

    step: Step

    def begin(self, step: Step) -> None:
        """Before forward, of a step that is not the first: the optimizer's state is there."""
        self.step, self.ledger, self.units = step, step.ledger, step.units
        self.take_parameters()

    def take_parameters(self) -> None:
        self.ledger.take(PARAMETERS, FLOAT * values(self.units))
        self.take_moments(STATE, FLOAT * values(self.units))

    def take_moments(self, name: str, nbytes: int) -> None:
        """AdamW's, each of so many bytes, and its step counts."""
        if self.step.has_moments:
            self.ledger.take(name, 2 * nbytes)
            self.ledger.take(COUNTS, FLOAT * sum(map(len, self.units)))

    def enter(self, unit: int) -> None:
        """Forward comes to a unit."""

    def leave(self, unit: int) -> None:
        """Forward has left a unit."""

    def enter_backward(self, unit: int) -> None:
        """Backward comes to a unit."""

    def leave_backward(self, unit: int) -> None:
        """Backward has computed all gradients of the unit."""

    def pass_backward(self, unit: int, to: int) -> None:
        """Backward goes from a unit to the one that made its input."""
        self.leave_backward(unit)
        self.enter_backward(to)

    def read(self, parameter: Parameter) -> None:
        """An operator of forward or backward is about to read the parameter."""

    def drop(self, parameter: Parameter) -> None:
        """The operator has read it."""

    def gradient(self, parameter: Parameter) -> None:
        """The parameter's gradient is there, and what was needed to compute it is freed."""

    def finish(self) -> None:
        """Backward is done."""


def peak_of_part(ledger: Ledger, mode: str) -> Bytes:
    """The peak of a step's "forward", of its "forward_backward", or of the whole "step", once it has been run.

    AdamW's state comes with the first update, so it is not there where only parts are run.
    """
    peak = ledger.peaks["after_forward"] if mode == "forward" else ledger.peak
    return peak if mode == "step" else peak.without(STATE, COUNTS)
