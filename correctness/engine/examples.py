"""How Hypothesis draws examples here; the mark `examples(each_time, judged, sweep)` sets their number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, seed, settings

ENOUGH_TO_SHRINK = 100

PATIENCE = 4.0
"""Seconds after which no more examples are drawn, except in the sweep: a slow implementation is not wrong."""


def autocast_takes(mode: str, *dtypes: torch.dtype) -> bool:
    """Return True if the mode is no autocast, or an autocast that takes those dtypes. torch.cat under autocast is an
    error for float64 and for the other half precision."""
    _, is_autocast, to = mode.partition("autocast to ")
    return not is_autocast or set(dtypes) <= {torch.float32, getattr(torch, to)}


LARGEST = 400


def one_beyond_tiles(examples: int) -> Iterator[int]:
    """Yield sizes up to LARGEST, first those one above a multiple of a large power of two, until time runs out."""
    sizes = sorted(range(1, LARGEST), key=lambda n: (n - 1) & -(n - 1), reverse=True)[:examples]
    patience = Patience(examples)
    for n in sizes:
        try:
            with patience:
                yield n
        except Enough:
            return


BESIDE_LAUNCHES = tuple(n + by for n in (32, 64, 128, 256, 512, 1024) for by in (1, -1, 0))
"""Numbers of tensors: one below, equal to and one above what a launch, or a bucket, may take."""


class Enough(Exception):
    """Ends a test whose examples have taken long without a failure."""


class Patience:
    """`with patience:` around each example stops the test when time is up; `patience.with_(test)` wraps a test. An
    example that has failed is always tried again, as Hypothesis asks."""

    def __init__(self, examples: int) -> None:
        self.seconds = PATIENCE if examples <= ENOUGH_TO_SHRINK else float("inf")
        self.began, self.has_failed, self.tried = time.perf_counter(), False, 0

    def with_(self, test: Callable[[], None]) -> None:
        with suppress(Enough):
            test()

    def __enter__(self) -> None:
        if self.tried and not self.has_failed and time.perf_counter() - self.began > self.seconds:
            raise Enough

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.tried += 1
        self.has_failed |= error is not None


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """Decorate a `hypothesis.given` test. The run's --seed draws the same examples again. Shrinking a failure takes
    up to minutes: with few examples the failing one is shown as it is."""
    phases = (Phase.generate, Phase.shrink) if examples > ENOUGH_TO_SHRINK else (Phase.generate,)
    options = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        derandomize=False,
    )

    def decorate(test: Any) -> Any:
        return seed(torch.initial_seed())(options(test))

    return decorate
