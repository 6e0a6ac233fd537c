"""What a way of training adds at each moment of a model's step: before and after a unit, where a parameter is read, and
where its gradient is there. `impl.accounting.programs` says what the model itself does.

    TransformerStep(case, Bucketed()).run().peak.entries
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.programs.parameters import FLOAT, Parameter, values

if TYPE_CHECKING:
    from impl.accounting.ledger import Bytes, Ledger
    from impl.accounting.programs.transformer import TransformerStep

PARAMETERS, GRADIENTS = "parameters", "gradients"
STATE, COUNTS = "exp_avg and exp_avg_sq", "AdamW's step counts"


class Strategy:
    """One device, or gradients that are all-reduced in place: parameters, gradients and AdamW's state are all here."""

    def begin(self, step: TransformerStep) -> None:
        """Before forward, of a step that is not the first: AdamW's state is there."""
        self.step, self.ledger, self.units = step, step.ledger, step.units
        self.take_parameters()

    def take_parameters(self) -> None:
        self.ledger.take(PARAMETERS, FLOAT * values(self.units))
        self.ledger.take(STATE, 2 * FLOAT * values(self.units))
        self.ledger.take(COUNTS, FLOAT * sum(map(len, self.units)))

    def enter(self, unit: int) -> None:
        """Forward comes to a unit."""

    def leave(self, unit: int) -> None:
        """Forward has left a unit."""

    def enter_backward(self, unit: int) -> None:
        """Backward comes to a unit."""

    def leave_backward(self, unit: int) -> None:
        """Backward has computed all gradients of the unit."""

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
