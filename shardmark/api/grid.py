"""The grid of a question's cases at each scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.api.own_model import OwnModel

SCALES = ("smoke", "laptop", "paper", "full")

MB = 2**20
"""One megabyte as PyTorch's `bucket_cap_mb` and the published all-reduce tables count it."""


@dataclass(frozen=True)
class Grid:
    """The cases of one question, scale by scale; at full scale, at least `full_rounds` of each.

    `paper` has the most informative of the published sizes; `full` has all published sizes, and is None where `paper`
    has them all. `own` makes a case of a user's own model; None where the question takes none.
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
