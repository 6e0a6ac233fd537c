"""The collectives' cases."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import MB, Grid

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of float32 whose larger tensor has `megabytes` on each of `ranks` ranks, which the test sets."""

    collective: str
    megabytes: int
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.collective}-{self.megabytes}MB"

    @property
    def bytes(self) -> int:
        """Bytes of the larger tensor on one rank."""
        return self.elements * self.itemsize

    @property
    def elements(self) -> int:
        """Elements of the larger tensor, as many for each rank."""
        return self.megabytes * MB // self.itemsize // self.ranks * self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4


def _cases(*megabytes: int) -> list[CollectiveCase]:
    return [CollectiveCase(collective, size) for collective in COLLECTIVES for size in megabytes]


COLLECTIVE_SIZES = Grid(
    smoke=_cases(1),
    laptop=[*_cases(1, 25), CollectiveCase("all_reduce", 100)],
    paper=_cases(1, 10, 25, 100, 1024),
)

LARGE_ALL_REDUCE = Grid(
    smoke=[CollectiveCase("all_reduce", 10)],
    laptop=[CollectiveCase("all_reduce", 1024)],
    paper=[],
)
"""Where the backend's alone is measured: with a peer it would take minutes."""
