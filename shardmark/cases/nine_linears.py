"""The cases of an MLP of square linears, which PyTorch's FSDP is often explained with."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid


@dataclass(frozen=True)
class NineLinearsCase:
    """One step of plain SGD of `linears` layers from `width` to `width`; `batch` rows on each of `ranks`."""

    width: int
    batch: int
    linears: int = 9
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.linears}x{self.width}-b{self.batch}"


NINE_LINEARS = Grid(
    smoke=[NineLinearsCase(64, batch=32)],
    laptop=[NineLinearsCase(512, batch=256)],
    paper=[NineLinearsCase(16_384, batch=8_192)],
)
