"""What one rank holds of square linears and their gradients while backward goes through the units, the last one first.

On CPU the backend is Gloo, which copies what it gathers once more for a moment, and what it reduces to shards too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.library.simple_fsdp import Shards
from impl.accounting.library.unnamed import Unnamed, by_rows
from impl.accounting.programs.parameters import FLOAT
from impl.collectives.accounting import reduce_scatter_buffers

if TYPE_CHECKING:
    from impl.fsdp.cases import NineLinearsCase


class Sharding:
    """Hooks through backward, and their bytes; subclasses say what each way of sharding does at them."""

    by_rows = False
    """Whether the ranks share each parameter's rows; or else a unit's values."""

    def __init__(self, case: NineLinearsCase, device: str = "cpu") -> None:
        self.case = case
        self.ledger = Unnamed()
        self.take, self.give = self.ledger.take, self.ledger.give
        self.weight, self.bias = FLOAT * case.width**2, FLOAT * case.width
        self.units = case.linears // case.linears_a_unit
        self.gradients = case.linears_a_unit * (self.weight + self.bias)
        self.shapes = (case.width, case.width), (case.width,)
        values = sum(by_rows(shape, case.ranks) for shape in self.shapes)
        flat = -(-self.gradients // (FLOAT * case.ranks)) * FLOAT * case.ranks
        self.unit = case.linears_a_unit * FLOAT * values if self.by_rows else flat
        """A unit with what makes it divide by the ranks, as it is gathered."""
        self.shard = self.unit // case.ranks
        self.offloaded = case.offload and device == "cuda"
        self.kept = 0 if self.offloaded else self.units * self.shard
        """All parameters that are there at any time."""
        self.kept_gradients = self.kept

    def begin(self) -> None:
        """What is there before backward."""
        self.take(self.kept)

    def before(self, unit: int) -> None:
        """Backward comes to the unit."""

    def compute(self) -> None:
        """Gradients of a linear's weight and bias, while that of its result is there."""
        self.take(self.weight, self.bias)

    def collect(self) -> None:
        """They are handed over."""

    def after(self, unit: int) -> None:
        """Backward is through the unit."""

    def finish(self) -> None:
        """Called once, after the last unit's backward."""

    def keep_gradients(self) -> None:
        """A unit's, this rank's part."""
        self.take(self.shard)
        self.give(self.shard if self.offloaded else 0)


class Replicated(Sharding):
    """torch DDP: parameters, buckets as large, and gradients that are not in them."""

    def __init__(self, case: NineLinearsCase, device: str = "cpu") -> None:
        super().__init__(case, device)
        self.kept_gradients = self.units * self.gradients
        self.kept = 2 * self.kept_gradients


class Sharded(Sharding):
    """Ours: a unit's gradients, once all are there, are put into a flat tensor, which stays until the next one's are.

    `ahead` units are gathered beside the one at hand, in place; or all stay from forward.
    """

    def __init__(self, case: NineLinearsCase, device: str = "cpu", ahead: int = 1, kept: bool = False) -> None:
        super().__init__(case, device)
        self.ahead = ahead
        self.gathered = _all(self.units) if kept or self.units == 1 else set()
        self.reducing = False
        self.buffers = reduce_scatter_buffers(self.unit, case.ranks)

    def begin(self) -> None:
        """Shards, and what stayed."""
        self.take(self.kept, len(self.gathered) * self.unit)

    def before(self, unit: int) -> None:
        """It and those ahead are gathered."""
        wanted = set(range(max(1, unit - self.ahead), unit + 1)) - self.gathered
        self.take(len(wanted) * self.unit)
        self.gathered |= wanted

    def after(self, unit: int) -> None:
        """The first unit's input has no gradient, so no hook of it fires."""
        if unit > 1:
            self._begin_reduce()

    def finish(self) -> None:
        """Reduce unit 1: its input has no gradient, so no hook fired."""
        self._begin_reduce()
        self._finish_reduce()

    def _begin_reduce(self) -> None:
        self.give(self.unit)
        self._finish_reduce()
        self.take(self.unit)
        self.give(self.gradients)
        self.take(self.buffers)
        self.reducing = True

    def _finish_reduce(self) -> None:
        if self.reducing:
            self.give(self.buffers)
            self.keep_gradients()
            self.take(FLOAT)  # the number that the average divides by
            self.give(FLOAT, self.unit)


class FSDP1(Sharding):
    """torch FSDP1: a unit's gradients are copied into a flat one while it is gathered, and that is reduced at once.

    The next unit is there from before its gradients are computed ("pre"), or after they are ("post"). Prefetching in
    forward makes a unit's views before the unit in front of it computes, so that in backward its gradients are copied
    only after that one's are computed. One rank alone keeps everything whole.
    """

    def __init__(
        self,
        case: NineLinearsCase,
        device: str = "cpu",
        backward_prefetch: str | None = "pre",
        forward_prefetch: bool = False,
    ) -> None:
        super().__init__(case, device)
        self.prefetch, self.late = backward_prefetch, forward_prefetch and case.ranks > 1
        self.gathered = _all(self.units) if self.units == 1 or case.ranks == 1 else set()

    def begin(self) -> None:
        """Shards, and what stayed."""
        self.take(self.kept, self.unit if self.units == 1 < self.case.ranks else 0)

    def before(self, unit: int) -> None:
        """It is gathered."""
        self._gather(unit)
        if self.prefetch == "pre":
            self._gather(unit - 1)

    def after(self, unit: int) -> None:
        """Its gradients are reduced."""
        if not self.late or unit < self.units:
            self._reduce(unit - 1)

    def finish(self) -> None:
        """The first one's still may have to be."""
        if self.late:
            self._reduce(0)

    def _reduce(self, ahead: int) -> None:
        self.take(self.unit)
        self.give(self.gradients)
        if self.case.ranks == 1:
            return
        self.give(self.unit)
        self.keep_gradients()
        if self.prefetch == "post":
            self._gather(ahead)
        self.take(self.unit)
        self.give(2 * self.unit)

    def _gather(self, unit: int) -> None:
        if unit > 0 and unit not in self.gathered:
            _gather(self)
            self.gathered.add(unit)


class FSDP2(Sharding):
    """torch FSDP2: the next unit is gathered before this one's gradients, which are copied together to be reduced.

    What is gathered is copied out into the parameters; gradients' copy stays until the next unit's are there too.
    """

    by_rows = True

    def __init__(self, case: NineLinearsCase, device: str = "cpu", kept: bool = False) -> None:
        super().__init__(case, device)
        self.here = _all(self.units) if kept or self.units == 1 else set()
        self.gathered = set(self.here)
        self.copied = 0

    def begin(self) -> None:
        """Shards, with the mesh's number of each rank, and what stayed."""
        self.take(self.kept, FLOAT * self.case.ranks, len(self.here) * self.unit)

    def before(self, unit: int) -> None:
        """It is there, the next one on its way."""
        self._gather(unit)
        if unit not in self.here:
            self.take(self.unit)
            self.give(self.unit if self.case.ranks > 1 else 0)
        self._gather(unit - 1)

    def after(self, unit: int) -> None:
        """Its gradients are reduced."""
        self.give(self.copied, self.unit)
        self.take(self.unit)
        padded = self.unit if self.unit > self.gradients else 0  # where rows are uneven, each gradient first
        self.take(padded)
        self.give(padded)
        self.give(self.gradients - self.bias)  # the last one's stays a moment longer
        self.keep_gradients()
        self.take(self.unit)
        self.give(self.unit, self.bias)
        self.copied = self.unit

    def _gather(self, unit: int) -> None:
        if unit > 0 and unit not in self.gathered and self.case.ranks > 1:  # one rank has all there is
            _gather(self)
            self.gathered.add(unit)


class Simple(Sharding):
    """SimpleFSDP: a weight is gathered to be read, and each gradient reduced for itself; one rank does neither."""

    by_rows = True

    def __init__(self, case: NineLinearsCase, device: str = "cpu") -> None:
        super().__init__(case, device)
        self.shards = Shards(self.ledger, case.ranks, FLOAT, FLOAT)

    def before(self, unit: int) -> None:
        """What goes into the first needs no gradient."""
        self.read = self.shapes[:1] if unit > 1 else ()
        self.shards.gather(*self.read)

    def compute(self) -> None:
        """The weight is gone before the bias's gradient is summed."""
        self.take(self.weight)
        self.shards.drop(*self.read)
        self.take(self.bias)

    def collect(self) -> None:
        """One after the other."""
        for shape in reversed(self.shapes):
            self.shards.reduce(shape)


def _gather(sharding: Sharding) -> None:
    """A unit, from shards that may have to be brought to the device."""
    shard = sharding.shard if sharding.offloaded else 0
    sharding.take(shard, sharding.unit)
    sharding.take(sharding.unit)
    sharding.give(sharding.unit, shard)


def _all(units: int) -> set[int]:
    return set(range(1, units + 1))
