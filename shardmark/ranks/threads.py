"""Threads that a call has left at work. A thread at rest harms nobody: it waits for its next task.

That is a thread of a pool between two tasks, one of a library, or a daemon that waits for a queue, a lock or a pipe, as
a wrapper's own does between collectives.
"""

from __future__ import annotations

import dis
import sys
import threading
import time
from types import FrameType

WAITING = ("threading", "queue", "selectors", "concurrent", "multiprocessing", "tqdm", "triton", "torch._inductor")
"""Modules in whose functions a thread waits for work."""
WAITS = ("get", "acquire", "wait", "recv", "recv_bytes", "read", "accept", "select", "poll", "join", "result")
"""Methods in C in which a daemon waits for work."""
ENDING = 0.1
"""Seconds that a thread may outlive the call that started it."""


class Threads:
    """The threads of this process now; `at_work` looks for new ones."""

    def __init__(self) -> None:
        self._before = set(sys._current_frames())

    def at_work(self) -> str | None:
        """New threads that do something, in words; None without any."""
        end = time.monotonic() + ENDING
        while working := self._working():
            if time.monotonic() > end:
                return "a thread" if working == 1 else f"{working} threads"
            time.sleep(ENDING / 20)
        return None

    def _working(self) -> int:
        new = {thread: frame for thread, frame in sys._current_frames().items() if thread not in self._before}
        daemons = {thread.ident for thread in threading.enumerate() if thread.daemon} if new else set()
        return sum(not _rests(frame, thread in daemons) for thread, frame in new.items())


def _rests(frame: FrameType, daemon: bool) -> bool:
    """Whether the thread at that frame waits for work. `run` is where a thread, or a pool, calls what it was given."""
    if daemon and _called(frame) in WAITS:
        return True
    outer: FrameType | None = frame if frame.f_code.co_name != "run" else None
    rests = outer is not None and _waits(frame)
    while outer is not None and rests and not daemon:
        rests, outer = _waits(outer), outer.f_back
    return rests


def _waits(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return any(name == each or name.startswith(f"{each}.") for each in WAITING)


def _called(frame: FrameType) -> str | None:
    """The last attribute that the frame has read, as a rule the method that it is in: C code has no frame."""
    before = (each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti)
    names = [each.argval for each in before if each.opname in ("LOAD_METHOD", "LOAD_ATTR")]
    return names[-1] if names else None
