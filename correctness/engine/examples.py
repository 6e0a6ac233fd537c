"""Which examples tests draw; the mark `examples(each_time, judged, sweep)` sets their number."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

FEW_EXAMPLES = 100
"""The sweep draws more, and draws all of them."""
PATIENCE = 4.0
"""Seconds after which no more of few examples are drawn: a slow implementation is not wrong."""


def autocast_takes(mode: str, *dtypes: torch.dtype) -> bool:
    """Return True if the mode is no autocast, or an autocast that takes those dtypes. torch.cat under autocast is an
    error for float64 and for the other half precision."""
    _, is_autocast, to = mode.partition("autocast to ")
    return not is_autocast or set(dtypes) <= {torch.float32, getattr(torch, to)}


LARGEST = 400


def one_beyond_tiles(examples: int) -> Iterator[int]:
    """Yield sizes up to LARGEST, first those one above a multiple of a large power of two, until time runs out."""
    sizes = sorted(range(1, LARGEST), key=lambda n: (n - 1) & -(n - 1), reverse=True)[:examples]
    until = time.perf_counter() + PATIENCE if examples <= FEW_EXAMPLES else float("inf")
    for n in sizes:
        yield n
        if time.perf_counter() > until:
            return


BESIDE_LAUNCHES = tuple(n + by for n in (32, 64, 128, 256, 512, 1024) for by in (1, -1, 0))
"""Numbers of tensors: one below, equal to and one above what a launch, or a bucket, may take."""
