"""Looking at other processes and at a backend's threads, for tests of what they leave behind."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or before it was read
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def are_freed(*references: weakref.ref, seconds: float = 10.0) -> bool:
    """Whether nobody holds them; a backend's worker thread may for a moment after it has reported a collective done."""
    gc.collect()
    return wait_until(lambda: all(reference() is None for reference in references), seconds)
