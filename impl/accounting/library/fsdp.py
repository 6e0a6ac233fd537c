"""PyTorch's FSDP1 and FSDP2 of the language model: bytes at the peak of one rank's training step, on CPU and Gloo.

The units are those of `impl.fsdp.accounting`. Gloo's all-gather holds what it gathers twice for a moment, and its
reduce-scatter copies what it reduces; NCCL does neither, and what CUDA's streams keep longer is not in here. Nor is the
scratch space that products take in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.transformer import EMBEDDING, FLOAT, ROOT, by_rows
from impl.fsdp.accounting import Units

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase


class _Library(Units):
    """What both have in common: copies, of what is gathered and of what is reduced."""

    def gather(self, unit: int) -> None:
        """Its whole, made of all ranks' shards in the dtype of computation, which stays."""
        cast = self.whole(unit) // self.ranks if self.c != FLOAT else 0
        self.ledger.take(cast, self.whole(unit))
        self.borrow(self.whole(unit))
        self.ledger.give(cast)

    def scatter(self, unit: int) -> None:
        """From a copy of all of its gradients the reduced shard of them, which stays, in float32."""
        shard = self.whole(unit) // self.ranks
        self.ledger.take(shard)
        if self.ranks > 1:
            self.borrow(self.whole(unit))
        self.widen(shard)

    def widen(self, shard: int) -> None:
        """A reduced shard in float32, where it is not."""
        if self.c != FLOAT:
            self.ledger.take(shard * FLOAT // self.c)
            self.ledger.give(shard)


class _Fsdp2(_Library):
    """Rows over the ranks. What is gathered is copied out into parameters, and gradients are copied to be reduced.

    In forward a unit's all-gather stays until the next one's is copied out, in backward what was to be reduced until
    the next one's gradients are there, when the next unit but one has been gathered already.
    """

    def __init__(self, case: FSDPCase, kept: bool = False, norm_alone: bool = False) -> None:
        super().__init__(case, norm_alone)
        self.kept = kept
        self.gathered = self.reduced = 0

    def padded(self, unit: int) -> int:
        return sum(by_rows(parameter, self.ranks) for parameter in self.units[unit])

    def gather(self, unit: int) -> None:
        """On one rank there is nothing to gather."""
        if self.ranks > 1:
            super().gather(unit)

    def _copy_out(self, unit: int) -> int:
        """The bytes of what it was copied from, which is still there: on one rank only a cast was, for a moment."""
        whole = self.whole(unit)
        self.ledger.take(whole)
        if self.ranks > 1:
            return whole
        self.borrow(whole if self.c != FLOAT else 0)
        return 0

    def enter(self, unit: int) -> None:
        if not self.units[unit]:
            return
        self.gather(unit)
        before, self.gathered = self.gathered, self._copy_out(unit)
        self.ledger.give(before)

    def leave(self, unit: int) -> None:
        if unit == ROOT:
            self.ledger.give(self.gathered)
        elif not self.kept and unit != self.last_norm:
            self.ledger.give(self.whole(unit))

    def enter_backward(self, unit: int) -> None:
        if self.kept:
            return
        if unit == self.output:
            self.gather(unit)
        if unit == self.last_norm:
            unit = self.output  # it is there; what comes next is what comes after the output projection
        else:
            self.ledger.give(self._copy_out(unit))
            if unit == self.output and self.last_norm != ROOT:
                return
        if unit > EMBEDDING:
            self.gather(unit - 1)

    def leave_backward(self, unit: int) -> None:
        take, give = self.ledger.take, self.ledger.give
        if not self.units[unit]:
            give(self.reduced)
            return
        last = self.c * self.values(self.units[unit][-1]) if self.ranks > 1 else 0  # a name still holds it
        give(self.whole(unit), self.reduced)
        self.reduced = self.whole(unit)
        take(self.reduced)
        uneven = [parameter for parameter in self.units[unit] if parameter[0] % self.ranks]
        self.borrow(self.c * sum(by_rows(parameter, self.ranks) for parameter in uneven))  # padded, then copied
        give(self.gradients(unit) - last)
        self.scatter(unit)
        give(last)
        if unit == ROOT:
            give(self.reduced)


class _Fsdp1(_Library):
    """Each unit as one flat parameter, and its gradients copied into a flat one before it goes.

    The next unit is gathered before its own gradients are computed ("pre") or after them ("post"). Gathered ahead in
    forward as well, a unit's gradients are flattened only when those of the next one are computed. On one rank nothing
    is sharded: the flat gradient is the one that stays, and what is gathered is a cast.
    """

    def __init__(self, case: FSDPCase, backward_prefetch: str | None = "pre", forward_prefetch: bool = False) -> None:
        super().__init__(case)
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.late: list[int] = []

    def gather(self, unit: int) -> None:
        if self.ranks > 1:
            super().gather(unit)
        else:
            self.ledger.take(self.whole(unit) if self.c != FLOAT else 0)

    def _free(self, unit: int) -> None:
        if self.ranks > 1 or self.c != FLOAT:
            self.ledger.give(self.whole(unit))

    def enter(self, unit: int) -> None:
        if not self.forward_prefetch or unit == ROOT:
            self.gather(unit)
        if self.forward_prefetch and unit < self.output:
            self.gather(unit + 1)

    def leave(self, unit: int) -> None:
        if unit != ROOT:
            self._free(unit)

    def enter_backward(self, unit: int) -> None:
        if unit == self.output or self.backward_prefetch is None:
            self.gather(unit)
        if unit > EMBEDDING and self.backward_prefetch == "pre":
            self.gather(unit - 1)

    def leave_backward(self, unit: int) -> None:
        self.late.append(unit)
        waiting = 1 if self.forward_prefetch and unit != ROOT else 0
        while len(self.late) > waiting:
            self._reduce(self.late.pop(0))

    def _reduce(self, unit: int) -> None:
        flat = self.whole(unit)
        self.ledger.take(flat)
        self.ledger.give(self.gradients(unit))
        self._free(unit)
        if unit > EMBEDDING and self.backward_prefetch == "post":
            self.gather(unit - 1)
        if self.ranks == 1:
            self.widen(flat)
        else:
            self.scatter(unit)
            self.ledger.give(flat)


def fsdp2_peak(case: FSDPCase, reshard_after_forward: bool = True) -> int:
    """Bytes at the peak of FSDP2's step, on a rank that has the most rows."""
    return _Fsdp2(case, kept=not reshard_after_forward).peak()


def accelerate_peak(case: FSDPCase, reshard_after_forward: bool = True) -> int:
    """The same where the final norm is a unit, which stays gathered: in backward, blocks are gathered only after it."""
    return _Fsdp2(case, kept=not reshard_after_forward, norm_alone=True).peak()


def fsdp1_peak(case: FSDPCase, backward_prefetch: str | None = "pre", forward_prefetch: bool = False) -> int:
    """Bytes at the peak of FSDP1's step."""
    return _Fsdp1(case, backward_prefetch, forward_prefetch).peak()
