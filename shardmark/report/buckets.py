"""Bucket sizes: what communication adds to a step by the model of overhead, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardmark.grid import MB

Entry = dict[str, Any]


def bucket_lines(entries: list[Entry], layout: Callable[..., list[str]]) -> Iterator[str]:
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
