"""Wait for events that a backend's worker thread or another process causes a moment later."""

import gc
import time
import weakref
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return True if the condition holds within that time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def are_freed(*references: weakref.ref, seconds: float = 10.0) -> bool:
    """Return True if every referent is freed within that time: a backend's thread may hold it a moment longer."""
    gc.collect()
    return wait_until(lambda: all(reference() is None for reference in references), seconds)
