"""A row's paired steps, written and read: its ratios to the peer and to the calibration load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardmark.meter.plan import LOAD, PEER, Measured
from shardmark.rows.fill import step_seconds
from shardmark.rows.row import Pairs as PairsEntry
from shardmark.verdict.betting import Interval
from shardmark.verdict.slowdown import FEWEST_PROCESSES, Paired, Pairs, paired

NAMES = (PEER, LOAD)


def paired_with(name: str, processes: Sequence[Sequence[Measured]]) -> list[Pairs]:
    """The step's seconds in each process that timed it beside `name`, and the other's: the slowest rank's."""
    timed = [ranks for ranks in processes if name in ranks[0].laps]
    return [(step_seconds(ranks), step_seconds(ranks, name)) for ranks in timed]


def sums(processes: Mapping[str, Sequence[Pairs]], confidence: float) -> dict[str, Paired]:
    """The pairs of each name, summed up; names without a pair are left out."""
    return {name: paired(pairs, confidence) for name, pairs in processes.items() if pairs}


def pairs_entry(found: Paired, can_repeat: bool) -> PairsEntry:
    """The part of a row; `can_repeat`: further processes could be started."""
    return {
        "ratio": found.ratio.center,
        "interval": found.ratio.ends,
        "confidence": found.ratio.confidence,
        "mean": found.mean,
        "mean_error": found.mean_error if math.isfinite(found.mean_error) else None,
        "processes": list(found.processes),
        "needed": FEWEST_PROCESSES if can_repeat else 1,
        "count": found.pairs,
    }


def pairs_of(time: Mapping[str, Any]) -> dict[str, tuple[Paired, int]]:
    """By the name of the other step: a row's pairs, and the number of processes that must show a slowdown.

    Raises KeyError, TypeError or ValueError where another version wrote the row.
    """
    return {name: (read(each), int(each["needed"])) for name, each in time.get("pairs", {}).items() if name in NAMES}


def read(entry: Mapping[str, Any]) -> Paired:
    """The reverse of `pairs_entry`; raises KeyError, TypeError or ValueError."""
    low, high = (0.0, math.inf) if entry["interval"] is None else map(number, entry["interval"])
    ratio = Interval(number(entry["ratio"]), low, high, number(entry["confidence"]))
    error = math.inf if entry["mean_error"] is None else number(entry["mean_error"])
    processes = tuple(number(each) for each in entry["processes"])
    if not processes or min(processes) <= 0 or ratio.center <= 0:
        raise ValueError("no positive ratio of a pair")
    return Paired(ratio, number(entry["mean"]), error, processes, int(number(entry["count"])))


def number(value: Any) -> float:
    """The value, which must be a number that was measured; else TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TypeError(f"{value!r} is no number that was measured")
    return value
