"""How hypothesis draws examples here; how many is said by a test's mark `examples(each_time, judged, sweep)`."""

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
"""Seconds after which no more examples are drawn, unless it is the sweep: slow is not wrong."""


def autocast_takes(mode: str, *dtypes: torch.dtype) -> bool:
    """Whether a mode such as "autocast to float16" is one for tensors of those dtypes, or is none of autocast.

    Under it torch.cat is an error for float64, and for the other half precision.
    """
    _, is_autocast, to = mode.partition("autocast to ")
    return not is_autocast or set(dtypes) <= {torch.float32, getattr(torch, to)}


LARGEST = 400


def one_beyond_tiles(examples: int) -> Iterator[int]:
    """That many of the sizes up to LARGEST, those first that are one more than a multiple of a large power of two.

    No more than there is patience for.
    """
    sizes = sorted(range(1, LARGEST), key=lambda n: (n - 1) & -(n - 1), reverse=True)[:examples]
    patience = Patience(examples)
    for n in sizes:
        try:
            with patience:
                yield n
        except Enough:
            return


BESIDE_LAUNCHES = tuple(n + by for n in (32, 64, 128, 256, 512, 1024) for by in (1, -1, 0))
"""Numbers of tensors: one more than one launch, or one bucket, may take, one fewer, and as many."""


class Enough(Exception):
    """Ends a test that has tried examples for long, and found none that fails."""


class Patience:
    """`with patience:` around what each example does; `patience.with_(test)` runs the test for as long as there is.

    Once an example has failed it is tried again in any case, as Hypothesis asks.
    """

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
    """Decorate a test of `hypothesis.given`. The run's --seed draws the same examples again.

    To look for a smaller example that fails takes up to minutes: where there are few, the one that fails is shown.
    """
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
