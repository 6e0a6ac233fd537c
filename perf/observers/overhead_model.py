"""Bucket sizes: what communication adds to a step by the model of overhead, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from impl.data_parallel.accounting import best_bucket_bytes, exposed_seconds
from impl.data_parallel.workload import OverheadCase
from impl.model import SIZES
from shardmark.api.grid import MB
from shardmark.meter.plan import IMPLEMENTATION, Measured
from shardmark.rows.observers import Entry, Observer
from shardmark.rows.observers.fits import fit_line
from shardmark.rows.row import Row
from shardmark.text import layout


class OverheadModel(Observer):
    """What bucket sizes should cost, from all-reduces of several sizes; nothing where noise hides the bandwidth."""

    def __init__(self, case: OverheadCase) -> None:
        self.case = case

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The "model" in the row's time."""
        if model := overhead_model(ranks, self.case):
            row["time"]["model"] = model

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The model beside what each bucket size was measured to expose."""
        return bucket_lines(entries)


def overhead_model(ranks: Sequence[Measured], case: OverheadCase) -> dict[str, Any] | None:
    """Overhead and bandwidth of an all-reduce, each size's time the median of the slowest rank's, and what they say.

    None where noise makes more bytes take no longer.
    """
    rounds = list(zip(*(rank.laps[IMPLEMENTATION] for rank in ranks), strict=True))
    seconds = {
        size * 1024: median(max(laps.parts[f"{size} KB"] for laps in round_) for round_ in rounds)
        for size in case.kilobytes
    }
    overhead, per_byte, miss = fit_line(seconds)
    if per_byte <= 0:
        return None
    gradients = 4 * SIZES[case.model].parameters
    fitted = max(overhead, 0.0), 1 / per_byte
    best = best_bucket_bytes(gradients, *fitted)
    return {
        "seconds": {str(nbytes): each for nbytes, each in seconds.items()},
        "gradient_bytes": gradients,
        "overhead": fitted[0],
        "bandwidth": fitted[1],
        "miss": miss,
        "best_bytes": best,
        "best_seconds": exposed_seconds(gradients, best, *fitted) if best else 0.0,
        "exposed": {
            str(size): exposed_seconds(gradients, min(size * MB, gradients), *fitted) for size in case.bucket_sizes
        },
    }


def bucket_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """The fitted overhead and bandwidth, and a table of exposed communication by bucket size; nothing without a fit."""
    rows = [entry["extra_info"] for entry in entries]
    fits = {row["implementation"]: row["time"]["model"] for row in rows if "model" in row["time"]}
    if not fits:
        return
    measured = {
        (row["implementation"], row["case"]["bucket_mb"]): row["time"]["parts"]["communication"]
        for row in rows
        if row["case"].get("bucket_mb") is not None and row["time"].get("parts")
    }
    wrappers = list(dict.fromkeys(implementation for implementation, _ in measured))
    for name, fit in fits.items():
        yield ""
        line = f"{fit['overhead'] * 1e3:.3f} ms + bytes / {fit['bandwidth'] / 1e9:.2f} GB/s"
        yield f"an all-reduce with {name}: {line} (misses by {fit['miss']:.0%} at most)"
    yield ""
    sizes = [int(size) for size in next(iter(fits.values()))["exposed"]]
    gradients = next(iter(fits.values()))["gradient_bytes"]
    yield from layout(
        [
            {
                "bucket MB": f"{size}",
                "buckets": f"{max(1, round(gradients / MB / size))}",
                **{f"n·o + (s/n)/w, {name}": _ms(fit["exposed"][str(size)]) for name, fit in fits.items()},
                **{f"measured, {name}": _ms(measured.get((name, size))) for name in wrappers},
            }
            for size in sizes
        ]
    )
    for name, fit in fits.items():
        yield f"least by the model, {name}: {_ms(fit['best_seconds'])} ms in buckets of {fit['best_bytes'] / MB:.2f} MB"
    for name in wrappers:
        size = min((size for wrapper, size in measured if wrapper == name), key=lambda size: measured[name, size])
        yield f"least as measured, {name}: {_ms(measured[name, size])} ms in buckets of at most {size} MB"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:,.3f}"
