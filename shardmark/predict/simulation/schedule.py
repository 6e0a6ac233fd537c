"""The schedule of a simulated step, in seconds: when the host launches each operator, and when the device runs it.

The host launches one operator after another, each onto the current stream. A stream runs its operators in order: one
begins once it is launched and the one before it has ended. Collectives have a stream of their own for each process
group. Where the program waits for an event, for a stream or for a collective, the current stream waits, as on CUDA; a
CPU has one stream, which is the host.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.optimizer import _get_value

from shardmark.predict.simulation.costs import Cost, cost_of
from shardmark.predict.simulation.kinds import Kind, kind_of

FIRST_STREAM = ""
HOST, COPY = "host", "copy between host and device"
"""The stream of operators that the host computes, and the name of copies."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Mark(Protocol):
    """Ends a part of a step: by the device's clock, or by the host's, which may be ahead of it."""

    def __call__(self, part: str, of_host: bool = False) -> None: ...


class Rates(Protocol):
    """Speeds of a device and its links."""

    on_host: bool
    """True for a CPU, where an operator occupies the host until it ends."""

    def seconds(self, cost: Cost) -> float:
        """Seconds that an operator takes on the device."""

    def launch(self, in_backward: bool) -> float:
        """Seconds that the host takes to launch an operator."""

    def collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Seconds of a collective among those ranks; `nbytes` is the larger of a rank's input and output."""

    def collective_launch(self) -> float:
        """Seconds that the host takes to launch a collective, with what wrappers do around it in Python."""

    def beside_collective(self) -> float:
        """Fraction of its usual pace at which a kernel runs beside a collective, which takes multiprocessors."""

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy between the host's pinned memory and the device's; nan where the link is not known."""

    def of_host(self, cost: Cost) -> float:
        """Seconds of an operator that the host computes; nan where its memory is not known."""

    def least(self, cost: Cost) -> float:
        """The lower bound of `seconds`."""

    def least_of_collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        """The lower bound of `collective`."""


@dataclass(frozen=True)
class Span:
    """One operator on a stream, from its first second to its last."""

    name: str
    stream: str
    begin: float
    end: float
    least: float
    """Lower bound of its seconds."""
    cost: Cost | None = None
    """Work of an operator; None for a collective."""
    nbytes: int = 0
    """Bytes of a collective."""


@dataclass
class Step:
    """One step: its end, its parts, and its spans, in seconds from its beginning."""

    seconds: float
    host: float
    """Seconds the host took to launch it."""
    parts: dict[str, float]
    spans: list[Span] = field(repr=False)
    waited: float = 0.0
    """Seconds the host waited for the device while it launched the step; they are not in `host`."""

    @property
    def at_least(self) -> float:
        """Lower bound of seconds, by the data sheet: all products in turn, or one group's collectives, whichever takes
        longer."""
        of_collectives: dict[str, float] = {}
        for span in self.spans:
            if span.cost is None:
                of_collectives[span.stream] = of_collectives.get(span.stream, 0.0) + span.least
        products = sum(span.least for span in self.spans if span.cost is not None)
        return max(products, *of_collectives.values(), 0.0)

    @property
    def peak(self) -> float:
        """The data sheet's FLOP/s at the dtypes of the step's products; 0 where it has none."""
        products = [span for span in self.spans if span.cost is not None and span.cost.flops]
        least = sum(span.least for span in products)
        return sum(span.cost.flops for span in products if span.cost is not None) / least if least else 0.0

    @property
    def copies(self) -> float:
        """Seconds of the copies between the host's memory and the device's, one after another."""
        return sum(span.end - span.begin for span in self.spans if span.name == COPY)

    @property
    def on_host(self) -> float:
        """Seconds of the operators that the host computes itself."""
        return sum(span.end - span.begin for span in self.spans if span.stream == HOST)

    def lanes(self, most: int = 200) -> dict[str, list[list[float]]]:
        """Busy times of each stream; neighbours are joined until at most `most` remain."""
        lanes: dict[str, list[list[float]]] = {}
        for span in sorted(self.spans, key=lambda span: span.begin):
            lanes.setdefault(span.stream or "compute", []).append([span.begin, span.end])
        return {name: _joined(busy, most) for name, busy in lanes.items()}


class Schedule:
    """Schedules the operators and collectives launched while `step` runs."""

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = rates
        self._running = False
        self._unknown = False
        """Whether the step runs something whose pace is not known."""
        self._host = self._waited = 0.0
        self._free: dict[str, float] = {}
        self._current = [FIRST_STREAM]
        self._reduced: dict[int, float] = {}
        """Time at which each tensor's all-reduce ends, by the tensor's address: all-reduces have no other handle of
        ours."""
        self._after_backward = 0.0
        self._spans: list[Span] = []
        self._sent: list[tuple[float, float]] = []
        """Begin and end of each collective."""
        self._marks: list[tuple[str, float]] = []

    @property
    def running(self) -> bool:
        return self._running

    def step(self, step: Callable[[Mark], None], ahead: float = 0.0) -> Step | None:
        """Run the step and return its predicted times; None where compiled code runs on a CPU, whose pace is not known,
        or where the link to the host is not known. The device begins `ahead` seconds later than the host. ValueError
        without rates."""
        if self.rates is None:
            raise ValueError("a schedule needs rates")
        began = self._over()
        self._host, self._waited, self._free = began, 0.0, dict.fromkeys(self._free, began + ahead)
        self._free[FIRST_STREAM] = began + ahead
        self._spans, self._sent, self._marks = [], [], []
        self._running, self._unknown = True, False
        try:
            step(self._mark)
            waited = self._waited
            launched = self._host - began - waited
            self.synchronize()
        finally:
            self._running = False
        if self._unknown:
            return None
        began += ahead
        parts: dict[str, float] = {}
        before = began
        for name, at in self._marks:
            parts[name] = parts.get(name, 0.0) + at - before
            before = at
        return Step(self._over() - began, launched, parts, [_later(span, -began) for span in self._spans], waited)

    def arrived(self, operator: OpOverload, args: tuple[Any, ...]) -> None:
        """The program calls an operator; `operator` follows once its results are allocated."""

    def operator(self, operator: OpOverload, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        """The host launches an operator onto the current stream."""
        reads = kind_of(operator) is Kind.READ
        on_host = self.rates is not None and self.rates.on_host
        if reads and not on_host and _reads_a_counter():
            return
        self._launch()
        if reads:
            self.synchronize()
        if operator is _WAIT:
            self.wait_for(args)
        cost = cost_of(operator, args, kwargs, results, on_a_gpu=self.rates is not None and not on_host)
        if cost is not None:
            self._kernel(operator._schema.name.partition("::")[2], cost)

    def fused(self, cost: Cost) -> None:
        """Compiled code launches a kernel of that cost."""
        self._unknown = self._unknown or (self.rates is not None and self.rates.on_host)
        self._launch()
        self._kernel(cost.name, cost)

    def _launch(self) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:
            self._end_backward()
        self._launched(in_backward)

    def _launched(self, in_backward: bool) -> None:
        """The host has launched an operator."""
        assert self.rates is not None
        self._host += self.rates.launch(in_backward)

    def _kernel(self, name: str, cost: Cost) -> None:
        """The current stream runs the operator of that name and cost."""
        assert self.rates is not None
        span = Span(name, self._current[-1], 0.0, self.rates.seconds(cost), self.rates.least(cost), cost)
        ended = self._run(span)
        if self.rates.on_host:
            self._host = ended

    def copied(self, nbytes: float, waits: bool) -> None:
        """The current stream copies between the host's memory and the device's; the host waits for it, or not."""
        self._launch()
        assert self.rates is not None
        seconds = self.rates.copy(nbytes)
        self._unknown |= isnan(seconds)
        over = self._run(Span(COPY, self._current[-1], 0.0, seconds, 0.0, Cost(torch.uint8, 0.0, nbytes)))
        if waits:
            self.host_waits(over)

    def of_host(self, name: str, cost: Cost) -> None:
        """The host computes an operator of that cost itself."""
        self._launch()
        assert self.rates is not None
        seconds = self.rates.of_host(cost)
        self._unknown |= isnan(seconds)
        self._host = self._run(Span(name, HOST, 0.0, seconds, 0.0, cost))

    def collective(self, name: str, nbytes: int, ranks: Sequence[int], group: str) -> float:
        """Launch a collective onto its group's stream, after the current stream's work; returns the time at which it
        ends."""
        if not self._running:
            return 0.0
        assert self.rates is not None
        self._host += self.rates.collective_launch()
        stream = f"collectives {group}"
        self.wait(self.free(self._current[-1]), stream)
        seconds, least = (of(name, nbytes, ranks) for of in (self.rates.collective, self.rates.least_of_collective))
        over = self._run(Span(name, stream, 0.0, seconds, least, None, nbytes))
        if seconds:
            insort(self._sent, (over - seconds, over))
        return over

    def free(self, stream: str) -> float:
        """The time at which the stream has run everything launched onto it."""
        return self._free.get(stream, 0.0)

    def wait(self, until: float, stream: str | None = None) -> None:
        """That stream, or the current one, waits until then."""
        stream = self._current[-1] if stream is None else stream
        self._free[stream] = max(self.free(stream), until)

    def host_waits(self, until: float) -> None:
        """The host waits until then, as for an event."""
        self._waited += max(0.0, until - self._host)
        self._host = max(self._host, until)

    def reduced(self, tensors: Sequence[Tensor], over: float) -> None:
        """An all-reduce of these tensors ends at `over`."""
        for tensor in tensors:
            self._reduced[tensor.data_ptr()] = over

    def wait_for(self, tensors: Sequence[Tensor]) -> None:
        """The current stream waits for all-reduces of these tensors."""
        for tensor in tensors:
            self.wait(self._reduced.pop(tensor.data_ptr(), 0.0))

    def synchronize(self) -> None:
        """The host waits for the device."""
        self._end_backward()
        self.host_waits(self._over())

    def wait_after_backward(self, tensors: Sequence[Tensor]) -> None:
        """The first stream waits for all-reduces of these tensors when backward has ended, as PyTorch's DDP does in
        C++."""
        self._after_backward = max([self._after_backward, *(self._reduced.get(x.data_ptr(), 0.0) for x in tensors)])

    def _end_backward(self) -> None:
        self.wait(self._after_backward, FIRST_STREAM)

    def _over(self) -> float:
        return max([self._host, *self._free.values()])

    def _mark(self, part: str, of_host: bool = False) -> None:
        self._end_backward()
        self._marks.append((part, self._host if of_host else max(self._host, self._free[FIRST_STREAM])))

    def _run(self, span: Span) -> float:
        """Run the span on its stream once it is launched and the stream is free; returns its end."""
        began = max(self._host, self.free(span.stream))
        over = began + span.end
        if span.cost is not None and span.stream == FIRST_STREAM and self.rates is not None:
            over = ends(began, span.end, self._sent, self.rates.beside_collective())
        self._free[span.stream] = over
        self._spans.append(replace(span, begin=began, end=over))
        return over

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Make the stream of that name current within the block."""
        self._current.append(name)
        try:
            yield
        finally:
            self._current.pop()


def _reads_a_counter() -> bool:
    """Whether an optimizer of PyTorch's reads its own number, as of the steps it has made: on CUDA that is the host's
    tensor, but for ASGD's and a learning rate that the caller puts on the device."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _get_value.__code__:
            return True
    return False


def ends(began: float, seconds: float, sent: list[tuple[float, float]], pace: float) -> float:
    """When a kernel that takes `seconds` alone ends, if it runs at that pace beside collectives. `sent` are their
    begins and ends, in order; those that are over are dropped, as kernels come in order too."""
    while sent and sent[0][1] <= began:
        del sent[0]
    at, left = began, seconds
    for begin, end in sent:
        if begin >= at + left:
            break
        if end <= at:
            continue
        left -= max(0.0, begin - at)
        at = max(at, begin)
        if left <= (end - at) * pace:
            return at + left / pace
        left -= (end - at) * pace
        at = end
    return at + left


def _later(span: Span, seconds: float) -> Span:
    return replace(span, begin=span.begin + seconds, end=span.end + seconds)


def _joined(busy: list[list[float]], most: int) -> list[list[float]]:
    """Neighbours joined across the smallest gaps, until at most `most` remain."""
    gap = (busy[-1][1] - busy[0][0]) / most
    joined = [busy[0]]
    for begin, end in busy[1:]:
        if begin - joined[-1][1] < gap:
            joined[-1] = [joined[-1][0], end]
        else:
            joined.append([begin, end])
    return joined
