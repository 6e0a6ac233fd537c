"""The cases of an MLP of square linears, which PyTorch's FSDP is often explained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardmark.cases.grid import SCALES, Grid

WRAPS = ("linears", "thirds", "whole")
"""What becomes a unit: each linear, each third of them, all."""


@dataclass(frozen=True)
class NineLinearsCase:
    """One step of plain SGD of `linears` layers from `width` to `width`; `batch` rows on each of `ranks`.

    `wrap` is what sharding gathers at once, of `WRAPS`: thirds of a number that divides by three. With `offload` what
    a rank keeps is in host memory.
    """

    width: int
    batch: int
    linears: int = 9
    wrap: str = "linears"
    offload: bool = False
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        wrap = "" if self.wrap == "linears" else f"-{self.wrap}"
        return f"{self.linears}x{self.width}-b{self.batch}{wrap}{'-offload' * self.offload}"

    @property
    def linears_a_unit(self) -> int:
        """How many are gathered at once."""
        return {"linears": 1, "thirds": self.linears // 3, "whole": self.linears}[self.wrap]


NINE_LINEARS = Grid(
    smoke=[NineLinearsCase(64, batch=32)],
    laptop=[NineLinearsCase(384, batch=192)],
    paper=[NineLinearsCase(16_384, batch=8_192)],
)


def _changed(change: Callable[[NineLinearsCase], list[NineLinearsCase]]) -> Grid:
    """The same cases at each scale, changed."""
    smoke, laptop, paper = (
        [changed for case in NINE_LINEARS.at(scale) for changed in change(case)] for scale in SCALES
    )
    return Grid(smoke, laptop, paper)


NINE_LINEARS_WRAPPED = _changed(lambda case: [replace(case, wrap=wrap) for wrap in WRAPS[1:]])
NINE_LINEARS_OFFLOADED = _changed(lambda case: [replace(case, offload=True)])
