"""Python's bytecode instructions that one step executes: a slowdown of Python alone shows in them, without noise.

    executed = bytecodes(workload)    # two more steps, each instruction of which calls back
    executed["mine.py:MyFlash.forward"]

Instructions of the thread that calls the step count, with those of hooks and of custom functions' backward on CPU. On
CUDA, autograd's own threads run backward, and their Python is not seen. The number depends on Python's minor version.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from shardmark.api.workload import Workload
from shardmark.meter.allocations import is_foreign, shown
from shardmark.meter.recording import no_gc

MOST = 3_000_000
"""A step with more bytecodes is not counted: to follow this many takes one to two seconds."""

LIBRARIES = "Python and libraries"
"""The name of all functions that are not the user's."""

_monitoring: Any = getattr(sys, "monitoring", None)
_TOOL = 4
"""Number of this tool in `sys.monitoring`, which names no other by it."""
_TOOLS = 6
"""Number of tools that `sys.monitoring` takes."""


def bytecodes(workload: Workload) -> dict[str, int] | None:
    """Instructions of one step of a workload that has warmed up, by function: "mine.py:MyFlash.forward", and LIBRARIES
    for all functions that are no user's. None where they are more than MOST, or where the user's own differ in the next
    step, as in a loop that waits. The number of steps is always the same, as ranks need."""
    first, second = _one_step(workload), _one_step(workload)
    if first is None or second is None or _of_the_user(first) != _of_the_user(second):
        return None
    return dict(sorted(second.items()))


def _one_step(workload: Workload) -> Counter[str] | None:
    workload.prepare()
    gc.collect()  # a collection within the step would run finalizers
    with no_gc():
        counts = _followed(lambda: workload.step(lambda part: None))
    if counts is None:
        return None
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[_name(code)] += count
    return named


def _of_the_user(named: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in named.items() if name != LIBRARIES}


def _name(code: CodeType) -> str:
    file = code.co_filename
    return LIBRARIES if is_foreign(file) else f"{shown(file)}:{code.co_qualname}"


def is_followed() -> bool:
    """Whether a debugger, a profiler or coverage follows this process's Python already."""
    tools = [] if _monitoring is None else [each for each in range(_TOOLS) if _monitoring.get_tool(each) is not None]
    return sys.gettrace() is not None or sys.getprofile() is not None or bool(tools)


def _followed(run: Callable[[], object]) -> Counter[CodeType] | None:
    """Run under `sys.monitoring`; before Python 3.12, which lacks it, under `sys.settrace`."""
    counts: Counter[CodeType] = Counter()
    left = MOST
    this_thread = threading.get_ident()

    def executed(code: CodeType, _: int = 0) -> None:
        nonlocal left
        if threading.get_ident() == this_thread:  # monitoring sees all threads
            counts[code] += 1
            left -= 1
            if left < 0:
                follow(False)

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode":
            executed(frame.f_code)
        else:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    def follow(begin: bool) -> None:
        if _monitoring is None:
            sys.settrace(trace if begin else None)
        else:
            _monitoring.set_events(_TOOL, _monitoring.events.INSTRUCTION if begin else 0)

    if _monitoring is not None:
        _monitoring.use_tool_id(_TOOL, "shardmark")
        _monitoring.register_callback(_TOOL, _monitoring.events.INSTRUCTION, executed)
    try:
        follow(True)
        run()
    finally:
        follow(False)
        if _monitoring is not None:
            _monitoring.free_tool_id(_TOOL)
    return None if left < 0 else counts
