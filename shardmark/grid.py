"""What every question's cases have in common: the work of a case, and the grid of cases at each scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SCALES = ("smoke", "laptop", "paper", "full")

MB = 2**20
"""One megabyte as PyTorch's `bucket_cap_mb` and the published all-reduce tables count it."""


@dataclass(frozen=True)
class Work:
    """What one step does on all ranks together: floating-point operations, and bytes it must read and write.

    `bytes_communicated` is what each rank must send, by theory; `model_flops`, where MFU is asked, the FLOPs that the
    model itself takes, without what a technique computes again.
    """

    flops: int = 0
    bytes_moved: int = 0
    bytes_communicated: int = 0
    model_flops: int = 0


@dataclass(frozen=True)
class OwnModel:
    """A user's own model, of `--model`, as far as a case has to know it."""

    spec: str
    """What makes it again in another process: FILE:ATTR, with an absolute path."""
    name: str
    dtype: str
    """Of its parameters."""
    parameters: int = 0
    flops: int = 0
    """Of a forward and a backward pass over one rank's batch; 0 where they cannot be counted."""


@dataclass(frozen=True)
class Grid:
    """The cases of one question, scale by scale; at full scale, at least `full_rounds` of each.

    `paper` has the telling ones of what people publish, and `full` all of them, where these are more. `own` makes a
    case of a user's own model, where the question takes one.
    """

    smoke: Sequence[Any]
    laptop: Sequence[Any]
    paper: Sequence[Any]
    full: Sequence[Any] | None = None
    full_rounds: int = 0
    own: Callable[[OwnModel], Any] | None = None

    def at(self, scale: str) -> Sequence[Any]:
        """The cases at "smoke", "laptop", "paper" or "full"."""
        cases = getattr(self, scale)
        return self.paper if cases is None else cases
