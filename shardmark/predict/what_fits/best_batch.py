"""Find the batch with which a strategy trains the most rows per second, among those that fit, in few predictions.

Reserved memory is near linear in the batch, so two predictions give a line and the line the largest batch. Each step of
the search predicts the batch it has found, so that what is shown is never extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import floor

from shardmark.predict.what_fits.outcome import Outcome
from shardmark.predict.what_fits.prediction import Prediction, Refused

MOST_SIZE = 2**20
"""The largest batch or context that is tried."""
MOST_PROBES = 5
"""Batches that are predicted for one strategy: two for a line, and more where the line does not hold."""


def best_batch(predicted: Callable[[int], Outcome], own: int) -> Outcome:
    """The outcome with the most rows per second; with one row where none fits. `own` is where the search begins.

    Tried are `own`, the power of two up to the estimate of the largest batch, and then the largest batch by the line
    through the two, until a prediction agrees with it. Batches of 64 and more are rounded down by up to 3%.
    """
    known = {own: predicted(own)}
    first = known[own]
    if isinstance(first.found, Prediction):
        size = _second(first, own)
        while size not in known and len(known) < MOST_PROBES:
            known[size] = predicted(size)
            size = _next(known)
    elif first.fits is None:
        return first
    elif own > 1:  # one tensor of it is too large
        known[1] = predicted(1)
    fitting = [each for each in known.values() if each.fits]
    if not fitting:
        return known[1] if 1 in known else predicted(1)
    most = max(size for size, each in known.items() if each.fits)
    above = next((known[size] for size in sorted(known) if size > most), None)
    larger = above.found if above and above.fits is None and isinstance(above.found, Refused) else None
    return replace(max(fitting, key=_speed), largest_batch=most, larger=larger)


def _speed(outcome: Outcome) -> tuple[float, int]:
    return outcome.rows_per_second or 0.0, outcome.batch or 0


def _second(outcome: Outcome, own: int) -> int:
    """The second batch to predict: the power of two up to the largest batch, if all bytes beside those live before a
    step grew with the batch; or another one, as a line takes two."""
    found = outcome.found
    assert isinstance(found, Prediction)
    row = max(1, found.reserved - found.before_step) / own
    largest = _within(floor((outcome.room - found.before_step) / row))
    power = 1 << (largest.bit_length() - 1)
    others = (power, largest, 2 * own if outcome.fits else own // 2)
    return next((_within(size) for size in others if size != own), own)


def _next(known: dict[int, Outcome]) -> int:
    """The largest batch by the line through two neighbours among the known ones; a known batch once it is found."""
    missing = {size: -each.free for size, each in sorted(known.items()) if each.free is not None}
    low = max((size for size, nbytes in missing.items() if nbytes <= 0), default=0)
    high = min((size for size in known if size > low), default=MOST_SIZE + 1)
    if high in known and high not in missing:  # not known to be too large for the device, but for this machine
        return max(low, _within(high * 3 // 4))
    lines = [(a, b) for a, b in pairwise(missing) if missing[b] > missing[a]]
    if not lines:
        return _within(min(2 * low, high - 1))
    # Between what fits and what does not, where both are known: below a kink the line is too flat.
    a, b = (low, high) if (low, high) in lines else min(lines, key=lambda line: min(abs(size - low) for size in line))
    size = floor(a - missing[a] * (b - a) / (missing[b] - missing[a]))
    return _within(max(low, min(size, high - 1)))


def _within(size: int) -> int:
    """The size with its six leading binary digits alone, from 1 to MOST_SIZE: no line is straighter."""
    digits = max(0, size.bit_length() - 6)
    return min(max(size >> digits << digits, 1), MOST_SIZE)
