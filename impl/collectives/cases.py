"""A case of a collective: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.api import MB

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")

KB = 2**10

CALLS = {
    "cpu": ((64 * KB, 20), (MB, 4)),
    "cuda": ((256 * KB, 100), (4 * MB, 25), (64 * MB, 4)),
}
"""By device: up to so many bytes, so many calls in one measurement, and one above all of them.

A measurement then takes a millisecond or more, as in nccl-tests, which time many calls and divide: a call of 4 KB
takes some 10 us with NCCL and some 200 us with Gloo, about as long as ranks start apart.
"""


def calls(nbytes: int, device: str) -> int:
    """Calls of a collective of that many bytes in one measurement: the same for all implementations."""
    return next((count for most, count in CALLS[device] if nbytes <= most), 1)


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of float32 whose larger tensor has `size` bytes on each rank; the test sets `ranks`.

    `bytes` is `size` rounded down to a whole number of elements for each rank, at least one each.
    """

    collective: str
    size: int
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.collective}-{in_units(self.size)}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        article = "a" if self.collective.startswith("r") else "an"
        return f"for {article} {self.collective.replace('_', '-')} of {in_units(self.size, ' ')}"

    @property
    def bytes(self) -> int:
        """Bytes of the larger tensor on one rank."""
        return self.elements * self.itemsize

    @property
    def elements(self) -> int:
        """Elements of the larger tensor, a multiple of `ranks`."""
        return max(1, self.size // self.itemsize // self.ranks) * self.ranks

    @property
    def itemsize(self) -> int:
        return 4


def in_units(size: int, space: str = "") -> str:
    """Bytes in MB, or in KB or B where they are no multiple: "25MB", or with a space "8,192 MB"."""
    unit, name = next((unit, name) for unit, name in ((MB, "MB"), (KB, "KB"), (1, "B")) if size % unit == 0)
    return f"{size // unit:{',' if space else ''}}{space}{name}"
