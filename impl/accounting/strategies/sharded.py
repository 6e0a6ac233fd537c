"""What a rank holds where parameters, gradients and AdamW's state are sharded (FSDP)."""

from __future__ import annotations

from impl.accounting.programs.parameters import (
    FLOAT,
    ROOT,
    padded,
    values,
    with_norms_in_root,
)
from impl.accounting.strategies import GRADIENTS, Step, Strategy
from impl.collectives.accounting import reduce_scatter_buffers


class UnitSharded(Strategy):
    """A rank has a shard of every unit's parameters, gradients and AdamW's state; with `offload` in host memory."""

    def __init__(self, ranks: int, *, offload: bool = False) -> None:
        self.ranks, self.offload = ranks, offload

    def take_parameters(self) -> None:
        if not self.offload:
            shards = sum(self.shard(unit) for unit in range(len(self.units)))
            self.ledger.take("shard of parameters", shards)
            self.take_moments("shard of exp_avg and exp_avg_sq", shards)

    def shard(self, unit: int) -> int:
        """Bytes of this rank's shard of the unit."""
        return FLOAT * self.padded(unit) // self.ranks

    def padded(self, unit: int) -> int:
        """Values of a unit, padded to a multiple of the ranks: end to end, unless a subclass shards by rows."""
        return padded(values([self.units[unit]]), self.ranks)

    def full(self, unit: int) -> int:
        """Bytes of the unit, all-gathered."""
        return self.step.c * self.padded(unit)

    def gradients(self, unit: int) -> int:
        """Bytes of its gradients, without padding."""
        return self.step.c * values([self.units[unit]])


class FullySharded(UnitSharded):
    """Our FSDP. A unit is all-gathered in place, `prefetch` units ahead of where it is read, and freed after it, unless
    `reshard_after_forward` is False and it stays from forward to backward.

    When all of a unit's gradients are there, they are copied into one flat tensor (a single one needs no copy), and
    that is reduce-scattered, on CPU around a ring, while the next unit's backward runs.
    """

    def __init__(
        self, ranks: int, *, prefetch: int = 1, reshard_after_forward: bool = True, offload: bool = False
    ) -> None:
        super().__init__(ranks, offload=offload)
        self.prefetch, self.reshard_after_forward = prefetch, reshard_after_forward
        self.gathered: set[int] = set()
        self.reducing: int | None = None

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.forward_order = [*range(step.output + 1)]

    def full_parameters(self, unit: int) -> str:
        """The name of a unit's entry; those that all stay gathered have one together."""
        return f"full parameters of {self.step.unit_name(unit)}" if self.reshard_after_forward else "full parameters"

    def gathered_bytes(self, unit: int) -> int:
        """Bytes that its full parameters take beside the shards."""
        return self.full(unit)

    def gather(self, unit: int, order: list[int]) -> None:
        """The unit, and those after it in that order."""
        at = order.index(unit)
        for each in order[at : at + 1 + self.prefetch]:
            if each not in self.gathered:
                self.gathered.add(each)
                self.ledger.take(self.full_parameters(each), self.gathered_bytes(each))

    def release(self, unit: int) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.ledger.free(self.full_parameters(unit), self.gathered_bytes(unit))

    def enter(self, unit: int) -> None:
        self.gather(unit, self.forward_order)

    def leave(self, unit: int) -> None:
        if unit != ROOT and self.reshard_after_forward:
            self.release(unit)

    def enter_backward(self, unit: int) -> None:
        for each in (unit, ROOT) if unit == self.step.output else (unit,):
            if each in self.step.backward_order:
                self.gather(each, self.step.backward_order)

    def pass_backward(self, unit: int, to: int) -> None:
        """Both units have hooks on the tensor between them, and those of `to`, which forward came to first, run first:
        it is all-gathered before the other is freed."""
        self.enter_backward(to)
        self.leave_backward(unit)

    def leave_backward(self, unit: int) -> None:
        flat, name = self.full(unit), f"flat gradients of {self.step.unit_name(unit)}"
        self.release(unit)
        self.finish_reduction()
        if flat > self.gradients(unit) or len(self.units[unit]) > 1:
            self.ledger.take(name, flat)
            self.ledger.borrow("zero of the padding", self.step.c)
            self.ledger.free(GRADIENTS, self.gradients(unit))
        else:
            self.ledger.rename(GRADIENTS, name, flat)
        self.ledger.take("reduce-scatter buffers", self.buffers(unit))
        self.reducing = unit
        if unit == ROOT:
            self.finish_reduction()

    def buffers(self, unit: int) -> int:
        """Bytes that the sum of its gradients over the ranks needs beside them."""
        return reduce_scatter_buffers(self.full(unit), self.ranks, self.step.device, self.step.c)

    def finish_reduction(self) -> None:
        if self.reducing is not None:
            self.ledger.free("reduce-scatter buffers")
            self.ledger.take("shard of gradients", self.shard(self.reducing))
            self.ledger.borrow("number of ranks", 8)  # an int64, which the average divides by
            if self.offload:
                self.ledger.free("shard of gradients")
            self.ledger.free(f"flat gradients of {self.step.unit_name(self.reducing)}")
            self.reducing = None


class NormsReplicated(FullySharded):
    """Every rank has all of the norms' weights, with their gradients and moments; the root's unit is nothing else.

    Full parameters are the rank's own where it computes in float32, else a copy. Gradients are all-reduced in place.
    """

    def take_parameters(self) -> None:
        self.units = with_norms_in_root(self.units)
        super().take_parameters()

    def shard(self, unit: int) -> int:
        return FLOAT * self.padded(unit) if unit == ROOT else super().shard(unit)

    def padded(self, unit: int) -> int:
        return values([self.units[unit]]) if unit == ROOT else super().padded(unit)

    def gathered_bytes(self, unit: int) -> int:
        return 0 if unit == ROOT and self.step.c == FLOAT else super().gathered_bytes(unit)

    def buffers(self, unit: int) -> int:
        return 0 if unit == ROOT else super().buffers(unit)
