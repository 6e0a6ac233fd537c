"""A case of a collective: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.api import MB

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of float32 whose larger tensor has `megabytes` on each rank; the test sets `ranks`."""

    collective: str
    megabytes: int
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.collective}-{self.megabytes}MB"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        article = "a" if self.collective.startswith("r") else "an"
        return f"for {article} {self.collective.replace('_', '-')} of {self.megabytes:,} MB"

    @property
    def bytes(self) -> int:
        """Bytes of the larger tensor on one rank."""
        return self.elements * self.itemsize

    @property
    def elements(self) -> int:
        """Elements of the larger tensor, a multiple of `ranks`."""
        return self.megabytes * MB // self.itemsize // self.ranks * self.ranks

    @property
    def itemsize(self) -> int:
        return 4
