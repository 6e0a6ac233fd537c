"""The user's lines that a step's operators come from.

callers(plan)["aten::mul"]    # {"mine.py:12": 3, "backward of mine.py:12": 2}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile

from shardmark.meter.allocations import line_of_call
from shardmark.meter.counters import computes
from shardmark.meter.measure_case import warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Plan
from shardmark.meter.recording import no_gc

Callers = dict[str, dict[str, int]]
"""How often each operator is called from each line of the user's."""


def callers(plan: Plan) -> Callers:
    """The lines that this rank's operators come from in the step after the warm-ups. Every rank must call it together.

    It makes a pass of its own, once a row has more operators than before: recording Python's frames is slow.
    """
    release(plan.device)
    workload = warmed_up(plan)
    workload.prepare()
    with profile(with_stack=True) as profiler:
        workload.step(lambda part: None)
    assert profiler.kineto_results is not None
    with no_gc():  # a collection would walk all events
        return _lines(profiler.kineto_results.experimental_event_tree())


def _lines(roots: list[Any]) -> Callers:
    """Operators that count, by line; one within backward has the line of the forward operator with its number."""
    found: list[tuple[str, str, int | None]] = []
    forward: dict[int, tuple[int, str]] = {}
    stack: list[tuple[Any, str, bool, int | None]] = [(root, "", False, None) for root in roots]
    while stack:
        event, line, within, number = stack.pop()
        kind, fields = event.typed
        if kind in (_EventType.PyCall, _EventType.PyCCall):
            line = line_of_call(fields) or line
        elif kind == _EventType.TorchOp:
            if fields.scope == RecordScope.BACKWARD_FUNCTION:
                number = fields.sequence_number
            elif fields.scope == RecordScope.FUNCTION:
                if number is None and line and fields.sequence_number >= 0:
                    began = event.start_time_ns, line
                    forward[fields.sequence_number] = min(began, forward.get(fields.sequence_number, began))
                if not within and computes(event.name):
                    found.append((event.name, line, number))
                    within = True
        stack.extend((child, line, within, number) for child in event.children)
    counts: dict[str, Counter[str]] = {}
    for name, line, number in found:
        if number in forward:
            line = f"backward of {forward[number][1]}"
        if line:
            counts.setdefault(name, Counter())[line] += 1
    return {name: dict(sorted(lines.items(), key=_most_often_first)) for name, lines in counts.items()}


def _most_often_first(line: tuple[str, int]) -> tuple[int, bool, str]:
    """Forward's before backward's."""
    name, count = line
    return -count, name.startswith("backward of "), name
