"""Memory of a technique on top of a plain step: the bytes it takes and frees at each moment, and the bytes of both.

beside(followed(plain, "cpu"), Flat()).peak.entries
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes, Ledger
from shardmark.api import AFTER_BACKWARD, AFTER_FORWARD, BEGIN, GRADIENT, PARAMETERS

if TYPE_CHECKING:
    from shardmark.api import Followed, Moment

FLOAT = 4  # bytes of a float32, which parameters, gradients and moments are unless a plain step says otherwise
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE, SHARD_OF_STATE = "the optimizer's state", "shard of the optimizer's state"


class Technique:
    """One device, or gradients that are all-reduced in place: the only addition to the plain step is the optimizer's
    state, which every step but the first has from the start."""

    plain: Followed
    ledger: Ledger
    values: dict[str, int]
    """Number of values of each parameter, by name."""

    def stand_beside(self, plain: Followed, ledger: Ledger) -> None:
        """Set the plain step, and the ledger in which the technique takes and frees bytes."""
        self.plain, self.ledger = plain, ledger
        self.values = {name: math.prod(shape) for name, shape in plain.parameters.items()}

    @property
    def itemsize(self) -> int:
        """Bytes of each value of the plain step's parameters; there must be at least one."""
        return self.plain.moments[0].live[PARAMETERS] // sum(self.values.values())

    def begin(self) -> None:
        """Called before forward."""
        self.ledger.take(STATE, self.plain.state)

    def at(self, moment: Moment) -> None:
        """Called at each moment of the plain step."""
        if moment.kind == GRADIENT:
            self.gradient(moment.name)

    def gradient(self, parameter: str) -> None:
        """Called when the gradient of that parameter is complete."""

    def finish(self) -> None:
        """Called after backward."""

    def take_shards(self, nbytes: int) -> None:
        """Replace parameters and AdamW's state by float32 shards; `nbytes` are those of the parameters' shards."""
        self.ledger.free(PARAMETERS)
        self.ledger.take("shard of parameters", nbytes)
        if self.plain.state:
            self.ledger.take(SHARD_OF_STATE, 2 * nbytes + FLOAT * len(self.plain.parameters))  # and step counts


MARKS = {BEGIN: "before_step", AFTER_FORWARD: "after_forward", AFTER_BACKWARD: "after_backward"}


def beside(plain: Followed, technique: Technique | None = None) -> Ledger:
    """Ledger of plain step and technique in a step after the first, with marks "before_step", "after_forward",
    "after_backward" and "after_step"; "after_init" is before the first step."""
    technique = technique or Technique()
    technique.stand_beside(plain, ledger := Ledger())
    for moment in plain.moments:
        ledger.beside(moment.live)
        if moment.kind == BEGIN:
            technique.begin()
            ledger.marks["after_init"] = without_state(ledger.live)
        technique.at(moment)
        if moment.kind in MARKS:
            ledger.mark(MARKS[moment.kind])
        ledger.beside(moment.peak)
        ledger.note_peak()
    technique.finish()
    ledger.mark("after_step")
    return ledger


def without_state(nbytes: Bytes) -> Bytes:
    """These bytes less the optimizer's state, which its first update allocates: parts of a step run without it."""
    return nbytes.without(STATE, SHARD_OF_STATE)


def peak_of_part(ledger: Ledger, mode: str) -> Bytes:
    """The peak of a step's "forward", of its "forward_backward", or of the whole "step"."""
    peak = ledger.peaks["after_forward"] if mode == "forward" else ledger.peak
    return peak if mode == "step" else without_state(peak)


def peak_of_first_step(ledger: Ledger) -> Bytes:
    """Peak of the first step. Its update allocates the optimizer's state, after the activations are freed."""
    return max(without_state(ledger.peak), ledger.marks["after_step"])
