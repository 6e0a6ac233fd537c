"""Exposed communication by bucket size: a model of per-call overhead and bandwidth, beside the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from shardmark.api.grid import MB
from shardmark.meter.plan import IMPLEMENTATION, Measured
from shardmark.rows.columns import Entry
from shardmark.rows.observers.fits import fit_polynomial
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row
from shardmark.text import layout

ROUNDING = 1e-9
"""Share of a time below which what bytes add to it is the fit's own rounding, of either sign by the processor."""


class OverheadModel(Observer):
    """A model of what bucket sizes cost, from timed all-reduces of several sizes; none where noise hides the bandwidth.

    The timed parts are named after `kilobytes`, as in "64 KB". `bucket_sizes` are in MB. `best_bucket_bytes(gradients,
    overhead, bandwidth)` and `exposed_seconds(gradients, bucket, overhead, bandwidth)` are the model.
    """

    def __init__(
        self,
        gradient_bytes: int,
        kilobytes: Sequence[int],
        bucket_sizes: Sequence[int],
        best_bucket_bytes: Callable[[int, float, float], float],
        exposed_seconds: Callable[[int, float, float, float], float],
    ) -> None:
        self.gradient_bytes, self.kilobytes, self.bucket_sizes = gradient_bytes, kilobytes, bucket_sizes
        self.best_bucket_bytes, self.exposed_seconds = best_bucket_bytes, exposed_seconds

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The "model" in the row's time."""
        rounds = list(zip(*(rank.laps[IMPLEMENTATION] for rank in ranks), strict=True))
        # For each size, the median over the rounds of the slowest rank's time.
        seconds = {
            size * 1024: median(max(laps.parts[f"{size} KB"] for laps in round_) for round_ in rounds)
            for size in self.kilobytes
        }
        if model := self._model(seconds):
            row["time"]["model"] = model

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The model beside the measured exposed communication of each bucket size."""
        return bucket_lines(entries)

    def _model(self, seconds: dict[int, float]) -> dict[str, Any] | None:
        """Overhead and bandwidth of an all-reduce, from seconds by bytes; None where more bytes take no longer."""
        (per_byte, overhead), miss = fit_polynomial(seconds, degree=1)
        if per_byte * max(seconds) <= ROUNDING * max(seconds.values()):
            return None
        gradients = self.gradient_bytes
        fitted = max(overhead, 0.0), 1 / per_byte
        best = self.best_bucket_bytes(gradients, *fitted)
        return {
            "seconds": {str(nbytes): each for nbytes, each in seconds.items()},
            "gradient_bytes": gradients,
            "overhead": fitted[0],
            "bandwidth": fitted[1],
            "miss": miss,
            "best_bytes": best,
            "best_seconds": self.exposed_seconds(gradients, best, *fitted) if best else 0.0,
            "exposed": {
                str(size): self.exposed_seconds(gradients, min(size * MB, gradients), *fitted)
                for size in self.bucket_sizes
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
        if row["case"].get("bucket_mb") is not None and "communication" in row["time"].get("parts", {})
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
