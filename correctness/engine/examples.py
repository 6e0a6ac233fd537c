"""Which examples tests draw; the mark `examples(each_time, judged, sweep)` sets their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from correctness.support.contracts import counted_calls
from shardmark.api import note_unasked

FEW_EXAMPLES = 100
"""The sweep draws more, and draws all of them."""
MOST_CALLS = 10_000_000
"""Calls of functions after which no more of few examples are drawn: some 15 s. A slow implementation is not wrong. They
are counted, as seconds depend on what else the machine does; the verdict says that examples were left out."""


class Work:
    """Functions that a test's examples have called: counted in the examples 0, 1, 3, 7, 15 and so on, as counting takes
    time, and taken to be as many in those that follow each."""

    def __init__(self, bounded: bool) -> None:
        self._bounded = bounded
        self._begun = self._in_one = self._calls = 0

    @contextmanager
    def of_one_example(self) -> Iterator[None]:
        if self._bounded and self._begun & (self._begun + 1) == 0:
            with counted_calls() as counted:
                yield
            self._in_one = counted.calls
        else:
            yield
        self._begun += 1
        self._calls += self._in_one

    def is_enough(self) -> bool:
        return self._calls > MOST_CALLS


def autocast_takes(mode: str, *dtypes: torch.dtype) -> bool:
    """Return True if the mode is no autocast, or an autocast that takes those dtypes. torch.cat under autocast is an
    error for float64 and for the other half precision."""
    _, is_autocast, to = mode.partition("autocast to ")
    return not is_autocast or set(dtypes) <= {torch.float32, getattr(torch, to)}


LARGEST = 400


def one_beyond_tiles(examples: int) -> Iterator[int]:
    """Yield sizes up to LARGEST, first those one above a multiple of a large power of two; fewer if they are slow."""
    sizes = sorted(range(1, LARGEST), key=lambda n: (n - 1) & -(n - 1), reverse=True)[:examples]
    work = Work(examples <= FEW_EXAMPLES)
    for drawn, n in enumerate(sizes, 1):
        with work.of_one_example():
            yield n
        if work.is_enough() and drawn < len(sizes):
            note_unasked(LEFT_OUT)
            return


LEFT_OUT = f"too slow: after {MOST_CALLS:,} calls of functions, its further examples were left out"
"""Why the verdict is not on all examples."""


BESIDE_LAUNCHES = tuple(n + by for n in (32, 64, 128, 256, 512, 1024) for by in (1, -1, 0))
"""Numbers of tensors: one below, equal to and one above what a launch, or a bucket, may take."""
