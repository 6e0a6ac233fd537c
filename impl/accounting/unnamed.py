"""What the forms of SimpleFSDP take and give: numbers without names, in one entry of a ledger."""

from __future__ import annotations

import math

from impl.accounting.ledger import Bytes, Ledger


class Unnamed:
    """Bytes under one name, alone or within a program's ledger."""

    def __init__(self, ledger: Ledger | None = None, name: str = "parameters, gradients and buffers") -> None:
        self.named, self.name = ledger or Ledger(), name

    def take(self, *sizes: int) -> None:
        self.named.take(self.name, sum(sizes))

    def give(self, *sizes: int) -> None:
        self.named.free(self.name, sum(sizes))

    @property
    def live(self) -> int:
        return self.named.total

    @property
    def peak(self) -> Bytes:
        return self.named.peak


def by_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Values of a parameter of that shape, with as many more rows as make them divide by the ranks."""
    rows, *columns = shape
    return -(-rows // ranks) * ranks * math.prod(columns)
