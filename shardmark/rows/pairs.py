"""A row's paired steps, written and read: its ratios to the peer and to the calibration load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardmark.meter.plan import LOAD, PEER, Measured
from shardmark.rows.fill import step_seconds
from shardmark.rows.row import Pairs as PairsEntry
from shardmark.verdict.betting import Interval
from shardmark.verdict.slowdown import Paired, Pairs, paired

NAMES = (PEER, LOAD)


def paired_with(name: str, processes: Sequence[Sequence[Measured]]) -> list[Pairs]:
    """The step's seconds in each process that timed it beside `name`, and the other's: the slowest rank's."""
    timed = [ranks for ranks in processes if name in ranks[0].laps]
    return [(step_seconds(ranks), step_seconds(ranks, name)) for ranks in timed]


def sums(fresh: Mapping[str, Sequence[Pairs]], own: Mapping[str, Pairs | None], confidence: float) -> dict[str, Paired]:
    """The pairs of each name, summed up: those of fresh processes, else those of the run's own."""
    found = {name: paired(pairs, confidence) for name, pairs in fresh.items() if pairs}
    rest = {name: paired([pairs], confidence, fresh=False) for name, pairs in own.items() if pairs is not None}
    return {name: (rest | found)[name] for name in NAMES if name in found or name in rest}


def pairs_entry(found: Paired) -> PairsEntry:
    """The part of a row."""
    return {
        "ratio": found.ratio.center,
        "interval": found.ratio.ends,
        "confidence": found.ratio.confidence,
        "mean": found.mean,
        "mean_error": found.mean_error if math.isfinite(found.mean_error) else None,
        "processes": list(found.processes),
        "means": list(found.means),
        "count": found.pairs,
    }


def pairs_of(time: Mapping[str, Any]) -> dict[str, Paired]:
    """A row's pairs, by the name of the other step.

    Raises KeyError, TypeError or ValueError where another version wrote the row.
    """
    return {name: read(each) for name, each in time.get("pairs", {}).items() if name in NAMES}


def read(entry: Mapping[str, Any]) -> Paired:
    """The reverse of `pairs_entry`; raises KeyError, TypeError or ValueError."""
    low, high = (0.0, math.inf) if entry["interval"] is None else map(number, entry["interval"])
    ratio = Interval(number(entry["ratio"]), low, high, number(entry["confidence"]))
    error = math.inf if entry["mean_error"] is None else number(entry["mean_error"])
    processes = tuple(number(each) for each in entry["processes"])
    means = tuple(number(each) for each in entry["means"])
    if min([ratio.center, *processes, *means]) <= 0 or len(means) != len(processes):
        raise ValueError("no positive ratio of a pair")
    return Paired(ratio, number(entry["mean"]), error, processes, means, int(number(entry["count"])))


def number(value: Any) -> float:
    """The value, which must be a number that was measured; else TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TypeError(f"{value!r} is no number that was measured")
    return value
