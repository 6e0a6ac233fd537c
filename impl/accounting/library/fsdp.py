"""PyTorch's FSDP1 and FSDP2 of the language model: bytes at the peak of one rank's training step, on CPU and Gloo.

The units are those of `impl.accounting.programs.parameters`. Gloo's all-gather holds what it gathers twice for a
moment, and its reduce-scatter copies what it reduces; NCCL does neither, and what CUDA's streams keep longer is not in
here. Nor is the scratch space that products take in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.accounting.library.unnamed import Unnamed, by_rows
from impl.accounting.programs.parameters import EMBEDDING, FLOAT, ROOT, Parameter
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies import GRADIENTS
from impl.accounting.strategies.sharded import UnitSharded

if TYPE_CHECKING:
    from impl.accounting.strategies import Step
    from impl.fsdp.cases import FSDPCase


class Library(UnitSharded):
    """What both have in common: copies, of what is gathered and of what is reduced."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.own = Unnamed(step.ledger)
        self.c, self.output, self.final_norm = step.c, step.output, step.final_norm

    def gradient(self, parameter: Parameter) -> None:
        self.ledger.rename(GRADIENTS, self.own.name, self.c * parameter.values)

    def borrow(self, *sizes: int) -> None:
        """Bytes that are needed for a moment."""
        self.own.take(*sizes)
        self.own.give(*sizes)

    def gather(self, unit: int) -> None:
        """Its whole, made of all ranks' shards in the dtype of computation, which stays."""
        cast = self.full(unit) // self.ranks if self.c != FLOAT or self.offload else 0
        self.own.take(cast, self.full(unit))
        self.borrow(self.full(unit))
        self.own.give(cast)

    def scatter(self, unit: int) -> None:
        """From a copy of all of its gradients the reduced shard of them, which stays, in float32."""
        shard = self.full(unit) // self.ranks
        self.own.take(shard)
        if self.offload:
            self.own.give(shard)
        if self.ranks > 1:
            self.borrow(self.full(unit))
        if not self.offload:
            self.widen(shard)

    def widen(self, shard: int) -> None:
        """A reduced shard in float32, where it is not."""
        if self.c != FLOAT:
            self.own.take(shard * FLOAT // self.c)
            self.own.give(shard)


class Fsdp2(Library):
    """Rows over the ranks. What is gathered is copied out into parameters, and gradients are copied to be reduced.

    In forward a unit's all-gather stays until the next one's is copied out, in backward what was to be reduced until
    the next one's gradients are there, when the next unit but one has been gathered already.
    """

    def __init__(self, ranks: int, kept: bool = False, offload: bool = False) -> None:
        super().__init__(ranks, offload=offload)
        self.kept = kept
        self.gathered = self.reduced = 0

    def take_parameters(self) -> None:
        super().take_parameters()
        self.ledger.take("ranks of the device mesh", FLOAT * self.ranks)

    def padded(self, unit: int) -> int:
        return sum(by_rows(parameter.shape, self.ranks) for parameter in self.units[unit])

    def gather(self, unit: int) -> None:
        """On one rank there is nothing to gather."""
        if self.ranks > 1:
            super().gather(unit)

    def _copy_out(self, unit: int) -> int:
        """The bytes of what it was copied from, which is still there: on one rank only a cast was, for a moment."""
        whole = self.full(unit)
        self.own.take(whole)
        if self.ranks > 1:
            return whole
        self.borrow(whole if self.c != FLOAT else 0)
        return 0

    def enter(self, unit: int) -> None:
        if not self.units[unit]:
            return
        self.gather(unit)
        before, self.gathered = self.gathered, self._copy_out(unit)
        self.own.give(before)

    def leave(self, unit: int) -> None:
        if unit == ROOT:
            self.own.give(self.gathered)
        elif not self.kept and unit != self.final_norm:
            self.own.give(self.full(unit))

    def enter_backward(self, unit: int) -> None:
        if self.kept:
            return
        if unit == self.output:
            self.gather(unit)
        if unit == self.final_norm:
            unit = self.output  # it is there; what comes next is what comes after the output projection
        else:
            self.own.give(self._copy_out(unit))
            if unit == self.output and self.final_norm != ROOT:
                return
        if unit > EMBEDDING:
            self.gather(unit - 1)

    def leave_backward(self, unit: int) -> None:
        take, give = self.own.take, self.own.give
        if not self.units[unit]:
            give(self.reduced)
            return
        last = self.c * self.units[unit][-1].values if self.ranks > 1 else 0  # a name still holds it
        give(self.full(unit), self.reduced)
        self.reduced = self.full(unit)
        take(self.reduced)
        give(self.gradients(unit) - last)
        self.scatter(unit)
        give(last)
        if unit == ROOT:
            give(self.reduced)


class Fsdp1(Library):
    """Each unit as one flat parameter, and its gradients copied into a flat one before it goes.

    The next unit is gathered before its own gradients are computed ("pre") or after them ("post"). Gathered ahead in
    forward as well, a unit's gradients are flattened only when those of the next one are computed. On one rank nothing
    is sharded: the flat gradient is the one that stays, and what is gathered is a cast.
    """

    def __init__(
        self,
        ranks: int,
        backward_prefetch: str | None = "pre",
        forward_prefetch: bool = False,
        offload: bool = False,
    ) -> None:
        super().__init__(ranks, offload=offload)
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.late: list[int] = []

    def gather(self, unit: int) -> None:
        if self.ranks > 1:
            super().gather(unit)
        else:
            self.own.take(self.full(unit) if self.c != FLOAT else 0)

    def _free(self, unit: int) -> None:
        if self.ranks > 1 or self.c != FLOAT:
            self.own.give(self.full(unit))

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
        flat = self.full(unit)
        self.own.take(flat)
        self.own.give(self.gradients(unit))
        self._free(unit)
        if unit > EMBEDDING and self.backward_prefetch == "post":
            self.gather(unit - 1)
        if self.ranks == 1:
            self.widen(flat)
        else:
            self.scatter(unit)
            self.own.give(flat)


def fsdp2_peak(case: FSDPCase, reshard_after_forward: bool = True, device: str = "cpu") -> Bytes:
    """Bytes at the peak of FSDP2's step, on a rank that has the most rows."""
    return TransformerStep(case, Fsdp2(case.ranks, kept=not reshard_after_forward), device=device).run().peak


def accelerate_peak(case: FSDPCase, reshard_after_forward: bool = True, device: str = "cpu") -> Bytes:
    """The same where the final norm is a unit, which stays gathered: in backward, blocks are gathered only after it."""
    strategy = Fsdp2(case.ranks, kept=not reshard_after_forward)
    return TransformerStep(case, strategy, norm_alone=True, device=device).run().peak


def fsdp1_peak(
    case: FSDPCase, backward_prefetch: str | None = "pre", forward_prefetch: bool = False, device: str = "cpu"
) -> Bytes:
    """Bytes at the peak of FSDP1's step."""
    return TransformerStep(case, Fsdp1(case.ranks, backward_prefetch, forward_prefetch), device=device).run().peak
