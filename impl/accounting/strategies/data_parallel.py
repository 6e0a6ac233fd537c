"""Data parallel: what is held beside the gradients, or in place of them, to all-reduce them.

Where they are reduced in place, one by one (`naive`, `overlapped`), nothing is: that is `Strategy` itself.
"""

from __future__ import annotations

from impl.accounting.programs.parameters import EMBEDDING, FLOAT, Parameter, values
from impl.accounting.strategies import GRADIENTS, Strategy
from shardmark.api import MB

BUCKETS = "buckets of gradients"


class Flat(Strategy):
    """Data parallel with one all-reduce: after backward, all gradients are copied into one tensor."""

    def finish(self) -> None:
        self.ledger.take("flat copy of the gradients", FLOAT * values(self.units))
        self.ledger.take("number of ranks", 8)  # an int64, which the average divides by


class Bucketed(Strategy):
    """Data parallel whose gradients live in buckets that exist from the start.

    Reduced in fewer bytes an element, a copy of each gradient exists from its bucket's launch until the step has all of
    it: of every gradient once backward is done; before that, where they do not all fit one bucket, of at most those
    that are there.
    """

    def __init__(self, reduce_bytes: int = FLOAT) -> None:
        self.copy_bytes = reduce_bytes if reduce_bytes != FLOAT else 0

    def take_parameters(self) -> None:
        super().take_parameters()
        self.ledger.take(BUCKETS, FLOAT * values(self.units))
        self.early = FLOAT * values(self.units) > MB

    def gradient(self, parameter: Parameter) -> None:
        self.ledger.free(GRADIENTS, FLOAT * parameter.values)  # it was copied into its slot
        if self.early and parameter.unit != EMBEDDING:  # whose bucket is the last
            self.ledger.take("gradients in the reduction's dtype", self.copy_bytes * parameter.values)

    def finish(self) -> None:
        late = values(self.units if not self.early else [self.units[EMBEDDING]])
        self.ledger.take("gradients in the reduction's dtype", self.copy_bytes * late)
