"""Which examples tests draw; the mark `examples(each_time, judged, sweep)` sets their number."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from shardmark.api import note_unasked

FEW_EXAMPLES = 100
"""The sweep draws more, and draws all of them."""
PATIENCE = 15.0
"""Seconds of this thread's own time after which no more of few examples are drawn: a slow implementation is not wrong.
Other work of the machine takes none of them, and the verdict says that examples were left out."""


def autocast_takes(mode: str, *dtypes: torch.dtype) -> bool:
    """Return True if the mode is no autocast, or an autocast that takes those dtypes. torch.cat under autocast is an
    error for float64 and for the other half precision."""
    _, is_autocast, to = mode.partition("autocast to ")
    return not is_autocast or set(dtypes) <= {torch.float32, getattr(torch, to)}


LARGEST = 400


def one_beyond_tiles(examples: int) -> Iterator[int]:
    """Yield sizes up to LARGEST, first those one above a multiple of a large power of two; fewer if they are slow."""
    sizes = sorted(range(1, LARGEST), key=lambda n: (n - 1) & -(n - 1), reverse=True)[:examples]
    until = time.thread_time() + PATIENCE if examples <= FEW_EXAMPLES else float("inf")
    for drawn, n in enumerate(sizes, 1):
        yield n
        if time.thread_time() > until and drawn < len(sizes):
            note_unasked(left_out(PATIENCE))
            return


def left_out(seconds: float) -> str:
    """Why the verdict is not on all examples."""
    return f"too slow: after {seconds:g} s of computing, its further examples were left out"


BESIDE_LAUNCHES = tuple(n + by for n in (32, 64, 128, 256, 512, 1024) for by in (1, -1, 0))
"""Numbers of tensors: one below, equal to and one above what a launch, or a bucket, may take."""
