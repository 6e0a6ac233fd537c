"""Full sharding in closed form: bytes at the peak of one rank's training step, and bytes it must send.

Units are the blocks, the embedding, the output projection, and the whole with its final norm. The peak is followed
through the language model's step operator by operator, exact on CPU and Gloo.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from impl.accounting.model import training_work
from impl.accounting.transformer import EMBEDDING, FLOAT, ROOT, Step
from impl.collectives.accounting import reduce_scatter_buffers
from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase


class Units(Step):
    """What ours and PyTorch's have in common: a unit's parameters are gathered, and its gradients reduced, at once.

    A rank has its part of parameters and moments; the part of a gradient comes when that is reduced.
    """

    def __init__(self, case: FSDPCase, norm_alone: bool = False) -> None:
        super().__init__(case, norm_alone)
        self.ranks = case.ranks
        self.ledger.take(sum(3 * FLOAT * self.padded(unit) // self.ranks for unit in range(len(self.units))))

    def padded(self, unit: int) -> int:
        """Values of the unit, with what makes them divide by the ranks: end to end, unless a subclass cuts by rows."""
        return -(-self.values(*self.units[unit]) // self.ranks) * self.ranks

    def whole(self, unit: int) -> int:
        """Bytes of the unit, gathered."""
        return self.c * self.padded(unit)

    def gradients(self, unit: int) -> int:
        """Bytes of its gradients, before they are padded."""
        return self.c * self.values(*self.units[unit])


class _Sharded(Units):
    """Our own. Units are gathered in place, up to `prefetch` ahead, and reduced one at a time, around a ring.

    When all of a unit's gradients are there, they are put into one flat tensor; one that is all there is needs no copy.
    """

    def __init__(self, case: FSDPCase, kept: bool, prefetch: int) -> None:
        super().__init__(case)
        self.kept, self.prefetch = kept, prefetch
        self.gathered: set[int] = set()
        self.order = [*range(self.output + 1)]  # of forward
        self.order_of_backward = [self.output, ROOT, *range(self.output - 1, EMBEDDING, -1)]
        self.reducing: tuple[int, int, int] | None = None  # bytes on their way, of buffers for them, and of what stays

    def gather(self, unit: int, order: list[int]) -> None:
        """The unit, and those after it."""
        at = order.index(unit)
        for each in order[at : at + 1 + self.prefetch]:
            if each not in self.gathered:
                self.gathered.add(each)
                self.ledger.take(self.whole(each))

    def release(self, unit: int) -> None:
        """What was gathered of it."""
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.ledger.give(self.whole(unit))

    def enter(self, unit: int) -> None:
        self.gather(unit, self.order)

    def leave(self, unit: int) -> None:
        if unit != ROOT and not self.kept:
            self.release(unit)

    def enter_backward(self, unit: int) -> None:
        for each in (self.output, ROOT) if unit == self.output else (unit,):
            if each != EMBEDDING:  # the gradient of its table is made of the indices alone
                self.gather(each, self.order_of_backward)

    def leave_backward(self, unit: int) -> None:
        self.release(unit)
        self._finish_reduction()
        if self.whole(unit) > self.gradients(unit) or len(self.units[unit]) > 1:
            self.ledger.take(self.whole(unit))
            self.ledger.give(self.gradients(unit))
        buffers = reduce_scatter_buffers(self.whole(unit), self.ranks, self.c)
        self.ledger.take(buffers)
        self.reducing = self.whole(unit), buffers, FLOAT * self.padded(unit) // self.ranks
        if unit == ROOT:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        if self.reducing is not None:
            gradients, buffers, shard = self.reducing
            self.ledger.give(buffers)
            self.ledger.take(shard)
            self.ledger.give(gradients)
            self.reducing = None


def sharded_peak(case: FSDPCase, kept: bool = False, prefetch: int = 1) -> int:
    """Peak in bytes; `kept` where units stay gathered after forward, `prefetch` how many are gathered ahead."""
    return _Sharded(case, kept, prefetch).peak()


def kept_peak(case: FSDPCase) -> int:
    """Peak in bytes where units stay gathered after forward."""
    return sharded_peak(case, kept=True)


def plain_peak(case: FSDPCase) -> int:
    """Peak in bytes where nothing is gathered ahead."""
    return sharded_peak(case, prefetch=0)


def work(case: FSDPCase, kept: bool = False) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send.

    Parameters are gathered for forward and, unless they are kept, for backward, all but the embedding's, whose gradient
    does not read it, and the whole's own; gradients are reduced once: (n-1)/n of their bytes each time.
    """
    one, units = training_work(case), Units(case)
    every = range(len(units.units))
    again = () if kept else every[EMBEDDING + 1 :]
    sent = 2 * sum(map(units.whole, every)) + sum(map(units.whole, again))
    return replace(
        one,
        flops=case.ranks * one.flops,
        model_flops=case.ranks * one.model_flops,
        bytes_moved=case.ranks * one.bytes_moved,
        bytes_communicated=sent * (case.ranks - 1) // case.ranks,
    )
