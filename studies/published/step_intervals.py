"""How far published steps lie from predictions that knew nothing of their authors, and the intervals that follow.

Intervals are conformal (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005): the quantiles of
those residuals. Rows of n by the same authors weigh as the root of n, as the rows of one table err together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from studies.published.recordings import Replayed
from studies.published.step_rows import Published

SHARE = 0.9
"""Share of published steps that an interval is to hold, as many below as above."""
APART = 1.1
"""Steps of one source whose tokens per second differ by more than this factor are compared in their order."""


@dataclass(frozen=True)
class Judged:
    """A published step, and its prediction by numbers that were fitted without its authors' rows."""

    row: Published
    step: Replayed

    @property
    def ratio(self) -> float:
        """Published by predicted seconds."""
        return self.row.seconds / self.step.seconds

    @property
    def error(self) -> float:
        """Error relative to the published time."""
        return 1 / self.ratio - 1


def interval(judged: Sequence[Judged]) -> tuple[float, float]:
    """Multiples of the predicted seconds between which nine of ten published steps lie."""
    authors = [each.row.authors for each in judged]
    weighed = sorted((each.ratio, authors.count(each.row.authors) ** -0.5) for each in judged)
    downwards = [(-ratio, weight) for ratio, weight in reversed(weighed)]
    return _quantile(weighed, (1 - SHARE) / 2), -_quantile(downwards, (1 - SHARE) / 2)


def _quantile(weighed: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted quantile of (value, weight) pairs in ascending order of values."""
    left = share * math.fsum(weight for _, weight in weighed)
    for value, weight in weighed:
        left -= weight
        if left <= 0:
            return value
    raise ValueError("no residuals")


def of_others(each: Judged, judged: Sequence[Judged]) -> tuple[float, float]:
    """The interval by the residuals of other authors on the same chip."""
    return interval([o for o in judged if o.row.chip == each.row.chip and o.row.authors != each.row.authors])


def holds(each: Judged, within: tuple[float, float]) -> bool:
    """Whether the published time lies in the interval."""
    return within[0] <= each.ratio <= within[1]


def in_order(judged: Sequence[Judged], *, alike: bool = False) -> tuple[int, int]:
    """How many pairs of one source differ in tokens per second, and how many of those are predicted in their order.
    With `alike` only pairs of one model on one device count."""
    right = pairs = 0
    for one, other in combinations(judged, 2):
        published = one.row.tokens_per_second / other.row.tokens_per_second
        if one.row.source != other.row.source or max(published, 1 / published) <= APART:
            continue
        if alike and (one.row.training.size, one.row.on) != (other.row.training.size, other.row.on):
            continue
        predicted = published * one.ratio / other.ratio
        pairs += 1
        right += (published > 1) == (predicted > 1)
    return pairs, right
