"""Intervals of a ratio from pairs of times, valid whenever one looks at them: testing by betting.

The steps of a case and of its peer are timed in pairs, and a coin is tossed for which of the two comes first. So what
the machine does meanwhile, a drift, a neighbour's burst, another clock frequency, favours either as often as the other,
however one pair depends on those before it. For two that take the same time nothing else is assumed of the noise; for
others, that it multiplies their times. Seconds alone, without a peer, have no coin: there rounds must be independent.

Let x be the logarithm of a pair's ratio. If the true one is at most t, then u = (x - t) / scale, cut to ±1, is on
average at most 0. Betting a fixed share s of one's wealth on each pair, for a gain of s u, is then not a winning
game: the probability that the wealth ever reaches 1 / error times its start is at most `error` (Ville's inequality),
at whatever moment one looks. The largest wealth counts even if it is lost again, so a rough period does not waste a
quiet one. Several shares bet side by side: small ones pay for small effects, large ones for large. Each bets at two
scales. At the small one a disturbed pair counts no more than an undisturbed one, and undisturbed pairs reveal a small
effect; at the large one, pairs that were all disturbed reveal how large the effect is.

The interval is the ratios that neither bettor rejects: one bets that the ratio is larger, one that it is smaller. If
both once rejected a ratio, because it changed on the way (slow first steps, say) or because one scale sees the median
and the other the mean, their final wealth decides; if both still have enough, the ratio stays in. The interval always
holds the center of all pairs, where payoffs add up to 0.

Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (2024); Huber, Robust Statistics, 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
REACHED, MISSED = "reached", "missed"

SHOWN_CONFIDENCE = 0.95
"""Confidence of the interval in tables, by which goals are judged."""

_SHARES = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 0.98])
_SCALES = np.array([0.01, 0.5])
"""A pair counts in full from this logarithm of its ratio on: the smallest effect that matters, and a burst."""
_HALVINGS = 40
"""Halvings of a bracket around an end of the interval, after which floats do not differ."""


@dataclass(frozen=True)
class Interval:
    """The true value lies between `low` and `high` with that confidence; 0 and infinity while nothing is known."""

    center: float
    low: float
    high: float
    confidence: float

    def verdict(self, limit: float) -> str:
        """PASS when the whole interval is within the limit, FAIL when all of it is over, else UNDECIDED."""
        return PASS if self.high <= limit else FAIL if self.low > limit else UNDECIDED

    def outcome(self, goal: float) -> str:
        """Whether a goal is REACHED, MISSED or UNDECIDED."""
        return {PASS: REACHED, FAIL: MISSED}.get(self.verdict(goal), UNDECIDED)

    @property
    def ends(self) -> list[float] | None:
        """Both ends; None while one of them is not known."""
        return [self.low, self.high] if self.low > 0 and math.isfinite(self.high) else None

    def __str__(self) -> str:
        return f"{100 * self.confidence:.6g}% interval [{self.low:.4g}, {self.high:.4g}]"


def interval(samples: Sequence[float], confidence: float = SHOWN_CONFIDENCE) -> Interval:
    """The interval of the value around which the positive `samples`, in the order in which they were taken, lie. All
    intervals of a growing series of samples hold it together with `confidence`, however many are looked at."""
    if not samples:
        raise ValueError("an interval needs at least one sample")
    pairs = _Pairs(samples, confidence)
    reach = float(np.max(_SCALES))
    bracket = float(np.min(pairs.logs)) - reach, float(np.max(pairs.logs)) + reach
    low = math.exp(_last(lambda t: pairs.side(t) > 0, *bracket)) if pairs.side(bracket[0]) > 0 else 0.0
    high = math.exp(_last(lambda t: pairs.side(t) >= 0, *bracket)) if pairs.side(bracket[1]) < 0 else math.inf
    # Any value between two samples far apart balances them: take the middle, and inverses have the inverse center.
    first, last = _last(lambda t: pairs.balance(t) > 0, *bracket), _last(lambda t: pairs.balance(t) >= 0, *bracket)
    return Interval(math.exp((first + last) / 2), low, high, confidence)


def decided(samples: Sequence[float], limit: float, confidence: float) -> bool:
    """Whether the interval lies on one side of a limit. Faster than finding its ends."""
    return _Pairs(samples, confidence).side(math.log(limit)) != 0


def fewest_rounds(confidence: float) -> int:
    """The fewest samples after which an interval of that confidence may have ends."""
    needed, rounds = _needed(confidence), 1
    while _log_wealth(_payoffs(np.ones(rounds)))[-1] < needed:
        rounds += 1
    return rounds


SHORTEST = 1e-9
"""Seconds that a round takes at least: a coarse clock shows 0 for a short step."""


def paired_ratios(seconds: Sequence[float], peer_seconds: Sequence[float]) -> list[float]:
    """Ratio of each round's time to the peer's time in the same round: the machine's drift cancels."""
    rounds = zip(seconds, peer_seconds, strict=True)
    return [max(mine, SHORTEST) / max(theirs, SHORTEST) for mine, theirs in rounds]


class _Pairs:
    """Logarithms of the samples, and the bets on their center."""

    def __init__(self, samples: Sequence[float], confidence: float) -> None:
        self.logs = np.log(np.maximum(samples, np.finfo(float).tiny))
        self._needed = _needed(confidence)

    def side(self, t: float) -> int:
        """1 if the center is shown to be above t, -1 if below, 0 if neither; never larger for a larger t."""
        payoffs = _payoffs(self.logs - t)
        above, below = _log_wealth(payoffs), _log_wealth(-payoffs)
        if min(above.max(), below.max()) >= self._needed:  # both once rejected t: their final wealth decides
            above, below = above[-1:], below[-1:]
        known = int(above.max() >= self._needed) - int(below.max() >= self._needed)
        return known if known * payoffs.sum() > 0 else 0

    def balance(self, t: float) -> float:
        """Positive where the samples' center is above t, negative where it is below."""
        return float(_payoffs(self.logs - t).sum())


def _needed(confidence: float) -> float:
    """Logarithm of the wealth that disproves a value: half of the error is for each end."""
    return math.log(2 / (1 - confidence))


def _payoffs(above: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gain of a bet of share 1, by scale and pair: how far the pair lies above the value that is bet against."""
    return np.clip(above / _SCALES[:, None], -1, 1)


def _log_wealth(payoffs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of the wealth after each pair of a bettor who begins with 1, in equal parts for each share and scale."""
    each = np.cumsum(np.log1p(_SHARES[:, None, None] * payoffs), axis=2)  # (share, scale, pair)
    most = each.max(axis=(0, 1))
    return np.asarray(most + np.log(np.exp(each - most).mean(axis=(0, 1))))


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The point at which `holds` becomes false, between `low`, where it is true, and `high`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
