"""Record a step's launches in order: each operator with its layout, each collective, each wait.

A simulation runs all of a step but its kernels. So the time between two kernels is the program's own (Python, autograd,
the dispatcher, views), and is measured here as the step is simulated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardmark.api.registry import Unsupported
from shardmark.predict.simulation.costs import Cost, cost_of
from shardmark.predict.simulation.kinds import Kind, kind_of
from shardmark.predict.simulation.no_kernels import has_value, past_kernels
from shardmark.predict.simulation.schedule import Schedule

GROUP, SUM = "a process group", "a sum"
"""Stand for a process group and for a reduction among a collective's arguments."""


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a tensor; `largest` is the largest value of an integer tensor, whose values may be
    indices."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    largest: int = 0

    @property
    def elements(self) -> int:
        """Elements of storage that it needs."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Call:
    """An operator and its arguments' layouts. Equal calls take equally long."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        schema = operator._schema
        layouts, named = _described(args), _described(sorted(kwargs.items()))
        return cls(schema.name, schema.overload_name or "default", layouts, named)

    @property
    def operator(self) -> OpOverload:
        namespace, _, name = self.name.partition("::")
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), self.overload)
        return found


@dataclass(frozen=True)
class Event:
    """One launch or wait of a step, and the program's time before it."""

    between: float = 0.0
    """Seconds of the program since the last event."""
    launches: int = 0
    """Operators called since the last event, views and this one included."""
    call: Call | None = None
    cost: Cost | None = None
    """Work of an operator that has a kernel."""
    ranks: int = 0
    """Size of a collective's group; 0 for other events."""
    name: str = ""
    """Name of the operator or collective, or of the part of the step that ends here."""
    nbytes: int = 0
    wait: int = 0
    """Wait for the collectives up to this one, counted from 1; 0 for other events."""


class Recorder(Schedule):
    """Records a step's events, without rates."""

    def __init__(self) -> None:
        super().__init__()
        self._events_of_step: list[Event] = []
        self._between, self._launches, self._last = 0.0, 0, 0.0
        self._of_thread = threading.local()
        self._host_thread = threading.get_ident()
        self._collectives = 0

    def record(self, step: Callable[[Callable[[str], None]], None]) -> list[Event]:
        """Run the step, and return its events."""
        self._events_of_step, self._between, self._launches, self._collectives = [], 0.0, 0, 0
        self._reduced, self._after_backward = {}, 0.0
        self._host_thread = threading.get_ident()
        self._running = True
        self._last = time.perf_counter()
        try:
            step(self._mark)
            self._end_backward()
            self._note()
        finally:
            self._running = False
        return self._events_of_step

    def arrived(self, operator: OpOverload, args: tuple[Any, ...]) -> None:
        self._between += time.perf_counter() - self._last
        self._launches += 1
        self._of_thread.called = operator, args  # of this thread, as some implementations send from one of their own
        if torch._C._current_graph_task_id() == -1:
            self._end_backward()
        self._last = time.perf_counter()

    def operator(self, operator: OpOverload, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        kind = kind_of(operator)
        if kind in (Kind.RUN, Kind.READ):
            self._between += time.perf_counter() - self._last
        elif kind is not Kind.SEND:
            cost = cost_of(operator, args, kwargs, results)
            call = Call.of(operator, args, kwargs)
            self._note(call=call, cost=cost, name=call.name.partition("::")[2])
        self._last = time.perf_counter()

    def collective(self, name: str, nbytes: int, ranks: Sequence[int], group: str) -> float:
        """Record a collective. Returns its number, in place of the time at which it ends."""
        if not self._running:
            return 0.0
        operator, args = self._of_thread.called
        self._collectives += 1
        self._note(call=Call.of(operator, args, {}), ranks=len(ranks), name=name, nbytes=nbytes)
        return float(self._collectives)

    def fused(self, cost: Cost) -> None:
        """Refuse compiled code: its kernels are C++ here, and no operator that ranks could time is like them."""
        raise Unsupported("the pace of what torch.compile generates is not predicted for this machine")

    def wait(self, until: float, stream: str | None = None) -> None:
        """Make the host wait; on any other thread (some implementations start one) do nothing."""
        if self._running and until and threading.get_ident() == self._host_thread:
            self._between += time.perf_counter() - self._last
            self._note(wait=int(until))
            self._last = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to record: the host is the device."""

    def _end_backward(self) -> None:
        if self._after_backward:
            until, self._after_backward = self._after_backward, 0.0
            self._note(wait=int(until))

    def _mark(self, part: str, of_host: bool = False) -> None:
        self._between += time.perf_counter() - self._last
        self._end_backward()
        self._note(name=part)
        self._last = time.perf_counter()

    def _note(self, **figures: Any) -> None:
        self._events_of_step.append(Event(self._between, self._launches, **figures))
        self._between, self._launches = 0.0, 0


def typical(steps: Sequence[Sequence[Event]]) -> list[Event]:
    """The last step's events; the program's time before each is the median over the steps with as many events."""
    last = list(steps[-1])
    alike = [each for each in steps if len(each) == len(last)]
    return [replace(event, between=median(each[i].between for each in alike)) for i, event in enumerate(last)]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and not value.is_complex()
        counts = whole and value.numel() and value.dtype != torch.bool and value.device.type == "cpu"
        with past_kernels():
            largest = int(value.max()) if counts and has_value(value) else 0
        return Layout(tuple(value.shape), value.stride(), value.dtype, max(largest, 0))
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, torch.ScriptObject):  # of a collective, and cannot be sent to a rank
        return SUM if "ReduceOp" in str(value._type()) else GROUP
    return value
