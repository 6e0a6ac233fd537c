"""The kernels of a profiled step: each one's time, phase, module and kind.

On CUDA these are the device's kernels. On CPU they are operators, each with its own time, without that of operators it
calls.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

ATTENTION, MATRIX_PRODUCT, SOFTMAX, ELSE = "attention", "matrix product", "softmax", "everything else"
REST = "rest"
"""The phase after a step's last mark; left out if nothing runs there."""

CATEGORIES = (MATRIX_PRODUCT, ATTENTION, SOFTMAX, ELSE)

_KINDS = (
    # Fused attention first: its kernels' names contain their matrix instructions too.
    (ATTENTION, r"attention|flash|fmha|sdpa"),
    (SOFTMAX, r"softmax"),
    (MATRIX_PRODUCT, r"gemm|gemv|cutlass|nvjet|wgmma|cublas|(^|::|_)(add|b|addb|baddb)?mm(_|$)|::(addmv|mv|dot)$"),
)


def category(name: str) -> str | None:
    """The category of an operator or a kernel by its name; None if the name does not tell."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), None)


@dataclass(frozen=True)
class Call:
    """One run of one kernel."""

    name: str
    operator: str | None
    """The operator that launched it; on CPU, its own name."""
    category: str
    phase: str
    module: str | None
    """The range of the module in whose forward or backward it ran."""
    start: float
    """Seconds from the start of the step to the start of its operator."""
    seconds: float


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel in one phase; `share` is their fraction of the phase's kernel time."""

    name: str
    category: str
    calls: int
    seconds: float
    share: float


@dataclass
class StepProfile:
    """Time of one step by kernel. `elapsed` is each phase's seconds by the clock, under the profiler."""

    elapsed: dict[str, float]
    calls: list[Call]

    def select(self, phase: str) -> list[Call]:
        """The phase's calls in the order in which they started."""
        return [call for call in self.calls if call.phase == phase]

    def kernels(self, phase: str) -> list[Kernel]:
        """The kernels of that phase, the longest first."""
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for call in self.select(phase):
            groups[call.name, call.category].append(call.seconds)
        total = sum(map(sum, groups.values()))
        kernels = [Kernel(*key, len(each), sum(each), sum(each) / (total or 1.0)) for key, each in groups.items()]
        return sorted(kernels, key=lambda kernel: -kernel.seconds)

    def inside(self, ending: str, phase: str) -> dict[str, list[Call]]:
        """The phase's calls by module, of modules whose path ends with `ending`, without those of their submodules."""
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.select(phase):
            if call.module is not None and call.module.endswith(ending):
                found[call.module].append(call)
        return dict(found)

    def seconds(self, phase: str) -> dict[str, float]:
        """The phase's seconds of each category."""
        sums = dict.fromkeys(CATEGORIES, 0.0)
        for call in self.select(phase):
            sums[call.category] += call.seconds
        return sums

    def as_row(self, top: int = 10) -> dict[str, Any]:
        """By phase: seconds, calls, the categories' seconds, and the `top` kernels."""
        return {
            phase: {
                "seconds": sum(call.seconds for call in self.select(phase)),
                "elapsed": elapsed,
                "calls": len(self.select(phase)),
                "categories": self.seconds(phase),
                "top": [asdict(kernel) for kernel in self.kernels(phase)[:top]],
            }
            for phase, elapsed in self.elapsed.items()
        }


def read_profile(
    profiler: torch.profiler.profile, phases: Sequence[str], modules: frozenset[str], device: str
) -> StepProfile:
    """The step that a finished profiler saw, given the names of the phases' and the modules' ranges."""
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU and not event.is_async]
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))  # a parent before its children
    ranges = [event for event in events if event.is_user_annotation and event.name in phases and not event.cpu_parent]
    begin = ranges[0].time_range.start
    elapsed: dict[str, float] = defaultdict(float)
    for event in ranges:
        elapsed[event.name] += event.time_range.elapsed_us() / 1e6

    calls = []

    def add(name: str, operator: str | None, kind: str | None, module: str | None, start: float, us: float) -> None:
        phase = next((event.name for event in ranges if event.time_range.start <= start <= event.time_range.end), None)
        if phase is not None:
            calls.append(Call(name, operator, kind or ELSE, phase, module, (start - begin) / 1e6, us / 1e6))

    for event, module, kind in _placed(events, modules):
        start = event.time_range.start
        if device == "cuda" and not event.is_user_annotation:
            for kernel in event.kernels:
                own = category(event.name) or category(kernel.name)
                add(kernel.name, event.name, own or kind, module, start, kernel.duration)
        elif device == "cpu" and _is_operator(event):
            name = event.name if "::" in event.name else "compiled graph"
            add(name, event.name, kind, module, start, event.self_cpu_time_total)
    if device == "cuda":
        for name, start, us in _launched_by_no_operator(profiler):
            add(name, None, category(name), None, start, us)
    calls.sort(key=lambda call: call.start)
    if not any(call.phase == REST for call in calls):
        elapsed.pop(REST, None)
    return StepProfile(dict(elapsed), calls)


def _is_operator(event: FunctionEvent) -> bool:
    """Whether the event is an operator of the dispatcher (aten::mm) or a compiled graph, and not a range, an autograd
    node or a Python function."""
    if event.is_user_annotation or event.name.startswith("autograd::"):
        return False
    return "::" in event.name or event.name.startswith("## Call CompiledFxGraph")


def _placed(
    events: list[FunctionEvent], modules: frozenset[str]
) -> Iterator[tuple[FunctionEvent, str | None, str | None]]:
    """Each event with its module and its category, which is attention inside fused attention.

    A node of backward belongs to the module whose forward made it: both have the same sequence number, and the node
    has the forward's thread. Several operators of forward may have that number; the last of them made the node.
    """
    module_of: dict[FunctionEvent | None, str | None] = {None: None}
    kind_of: dict[FunctionEvent | None, str | None] = {None: None}
    made: dict[tuple[int | None, int], str | None] = {}
    for event in events:
        module, kind = module_of[event.cpu_parent], kind_of[event.cpu_parent]
        if event.is_user_annotation:
            module = event.name if event.name in modules else module
        else:
            kind = category(event.name) or (ATTENTION if kind == ATTENTION else None)
            if event.sequence_nr >= 0 and event.fwd_thread:  # only a node of backward has a forward's thread
                module = made.get((event.fwd_thread, event.sequence_nr), module)
            elif event.sequence_nr >= 0:
                made[event.thread, event.sequence_nr] = module
        module_of[event], kind_of[event] = module, kind
        yield event, module, kind


def _launched_by_no_operator(profiler: torch.profiler.profile) -> Iterator[tuple[str, float, float]]:
    """(name, start, duration) in microseconds of kernels launched without an operator, as compiled code does."""
    result: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in result.events():
        on_device = event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
        if on_device and event.linked_correlation_id() == 0:
            yield event.name(), (event.start_ns() - result.trace_start_ns()) / 1e3, event.duration_ns() / 1e3
