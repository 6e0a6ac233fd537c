"""How hypothesis draws examples here; how many is said by a test's mark `examples(each_time, judged, sweep)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, seed, settings

ENOUGH_TO_SHRINK = 100


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
