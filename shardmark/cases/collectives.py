"""The collectives' cases."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import MB, Grid


@dataclass(frozen=True)
class AllReduceCase:
    """One float32 tensor of `megabytes` on each rank."""

    megabytes: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.megabytes}MB"

    @property
    def bytes(self) -> int:
        """Bytes of the tensor on one rank."""
        return self.megabytes * MB


ALL_REDUCE = Grid(
    smoke=[AllReduceCase(megabytes) for megabytes in (1, 10)],
    laptop=[AllReduceCase(megabytes) for megabytes in (1, 10, 100, 1024)],
    paper=[AllReduceCase(megabytes) for megabytes in (1, 10, 100, 1024)],
)
