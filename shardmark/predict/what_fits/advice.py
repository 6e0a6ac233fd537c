"""Predict each strategy at its best batch, or at the user's own; and the longest context that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shardmark.meter.hardware import Hardware
from shardmark.predict.what_fits.best_batch import MOST_SIZE, best_batch
from shardmark.predict.what_fits.outcome import Outcome
from shardmark.predict.what_fits.prediction import Refused, Strategy
from shardmark.predict.what_fits.processes import Predictions


def outcomes(
    predictions: Predictions,
    strategies: Sequence[Strategy],
    ranks: Sequence[int],
    devices: Sequence[Hardware],
    own_batch: bool,
    context: bool,
) -> list[Outcome]:
    """One outcome for each device, strategy and number of ranks, at its best batch or with `own_batch` at the user's;
    with the longest `context` if asked for. For each device, outcomes that fit come first, the fastest at the top.
    """
    wanted = [
        (strategy, size, on)
        for on in devices
        for strategy in strategies
        for size in ([1] if not strategy.on_ranks else sorted(ranks))
    ]
    for each in wanted:
        predictions.ask(*each)

    def outcome(strategy: Strategy, size: int, on: Hardware) -> Outcome:
        own = predictions.model.sizes[0]
        found = _predicted(predictions, strategy, size, on)
        if not own_batch and isinstance(own, int):
            found = best_batch(lambda rows: _predicted(predictions, strategy, size, on, 0, rows), own)
        return replace(found, context=_longest_context(predictions, found)) if context and found.fits else found

    with ThreadPoolExecutor(len(wanted)) as threads:  # they wait for the processes
        found = list(threads.map(outcome, *zip(*wanted, strict=True)))
    return [each for on in devices for each in sorted((o for o in found if o.hardware == on), key=place)]


def place(outcome: Outcome) -> tuple[bool, float]:
    """Sort key of the table's lines: strategies that fit first, the most rows per second at the top."""
    rate = outcome.rows_per_second
    if not outcome.fits or outcome.step is None:
        return not outcome.fits, math.inf
    return False, 1 / rate if rate else outcome.step.seconds / outcome.ranks


def _predicted(
    predictions: Predictions, strategy: Strategy, ranks: int, on: Hardware, dim: int = 0, size: int | None = None
) -> Outcome:
    """Wait for the prediction; `size` is the batch's size in dimension `dim`, None for the user's own."""
    found = predictions.ask(strategy, ranks, on, dim, size)()
    own = predictions.model.sizes[0]
    rows = size if dim == 0 and size is not None else own
    return Outcome(strategy, ranks, on, predictions.model, found, rows if isinstance(rows, int) else None)


def _longest_context(predictions: Predictions, found: Outcome) -> int | str:
    """The largest size of the second dimension with which the user's own batch fits; or why none was found.

    A size that the model refuses counts as too large, if the model takes any size beside the user's.
    """
    start = predictions.model.sizes[1]
    if isinstance(start, str):
        return start
    taken: set[int] = set()
    refused: list[str] = []

    def needed(size: int) -> int:
        there = _predicted(predictions, found.strategy, found.ranks, found.hardware, 1, size)
        if there.free is not None:
            taken.add(size)
            return -there.free
        assert isinstance(there.found, Refused)
        refused.append(there.found.reason)
        return 1

    most = largest(needed, start)
    return refused[0] if refused and not taken - {start} else most


def largest(excess: Callable[[int], int], start: int) -> int:
    """The largest number from 1 to MOST_SIZE whose excess is at most 0, or 0; `start` is where the search begins.

    The excess is almost linear, so the search alternates between linear interpolation and bisection.
    """
    known = {start: excess(start)}
    low, high = (start, None) if known[start] <= 0 else (0, start)
    by_line = True
    while high is None or high - low > 1:
        if high is None:
            probe = min(2 * low, MOST_SIZE)
        elif low and by_line:
            probe = low + int((high - low) * -known[low] / max(1, known[high] - known[low]))
        else:
            probe = (low + high) // 2
        probe = probe if high is None else min(max(probe, low + 1), high - 1)
        by_line = not by_line
        known[probe] = excess(probe)
        if known[probe] > 0:
            high = probe
        elif probe == MOST_SIZE:
            return probe
        else:
            low = probe
    return low
