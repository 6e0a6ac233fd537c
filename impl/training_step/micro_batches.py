"""Accumulate gradients over micro-batches: only the last backward pass of a step communicates, where a strategy can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accumulate(forward_and_backward: Callable[[], object], count: int, synchronizes: Any) -> None:
    """Run `count` forward and backward passes; the caller finishes the synchronization of the last one.

    All but the last are in `no_sync` of the wrapper or optimizer that averages gradients, so that gradients stay local.
    One without `no_sync`, as FSDP's, finishes each synchronization: averages add up to the average of the sum, and
    shards of gradients take less memory than full ones.
    """
    for _ in range(count - 1):
        if hasattr(synchronizes, "no_sync"):
            with synchronizes.no_sync():
                forward_and_backward()
        else:
            forward_and_backward()
            synchronizes.finish_gradient_synchronization()
    forward_and_backward()
