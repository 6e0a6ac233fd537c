"""A step's launches, recorded once and replayed at any rates: what `Schedule` says, without running the program again.

recording = recorded(Training(...), "a100-80gb")
recording.seconds(rates)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.schedule import FIRST_STREAM, Mark, Rates, Schedule, ends

LAUNCH, RUN, SEND, STAMP, AWAIT, HOST_AWAITS, SYNCHRONIZE = range(7)
Collective = tuple[str, int, tuple[int, ...] | range]


@dataclass
class Recording:
    """Launches and waits of one step, in the host's order. `costs` and `collectives` are those that differ."""

    events: list[tuple[int, ...]] = field(default_factory=list)
    costs: dict[Cost, int] = field(default_factory=dict)
    collectives: dict[Collective, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=lambda: {FIRST_STREAM: 0})

    def replay(self, rates: Rates, ahead: float = 0.0, steps: int = 1) -> Replayed:
        """The last of so many steps one after another, as `Schedule` has it. The device begins `ahead` seconds later
        than the host."""
        takes = [rates.seconds(cost) for cost in self.costs]
        sends = [rates.collective(*each) for each in self.collectives]
        forward, backward = rates.launch(False), rates.launch(True)
        per_collective, pace = rates.collective_launch(), rates.beside_collective()
        free, host, over = [ahead] * len(self.streams), 0.0, ahead
        sent: list[tuple[float, float]] = []
        for _ in range(steps):
            before, computing, communicating = over, 0.0, 0.0
            stamps: list[float] = []
            for kind, a, b, c in self.events:
                if kind == LAUNCH:
                    host += a * forward + b * backward
                elif kind == RUN:
                    began = host if host > free[a] else free[a]
                    free[a] = began + takes[b] if a or not sent else ends(began, takes[b], sent, pace)
                    computing += takes[b] if not a else 0.0
                elif kind == SEND:
                    host += per_collective
                    began = max(host, free[a], free[b])
                    free[a] = began + sends[c]
                    if sends[c]:
                        insort(sent, (began, free[a]))
                    communicating += sends[c]
                    stamps.append(free[a])
                elif kind == STAMP:
                    stamps.append(free[a])
                elif kind == AWAIT:
                    free[a] = max(free[a], stamps[b])
                elif kind == HOST_AWAITS:
                    host = max(host, stamps[a])
                else:
                    host = max(host, *free)
            over = max(host, *free)
        return Replayed(over - before, computing, communicating)


class Replayed(NamedTuple):
    """Seconds of a step; those of the first stream's kernels, alone; and those of all collectives."""

    seconds: float
    computing: float
    communicating: float

    @property
    def regime(self) -> str:
        """Compute-bound, launch-bound, or bound by communication that nothing hides."""
        if self.computing > 0.9 * self.seconds:
            return "compute-bound"
        return "exposed communication" if self.communicating > self.computing else "launch-bound"


class _Recorder(Schedule):
    """Notes what `Schedule` is told. Moments are numbers of stamps; those before the recording are 0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._stamps = 0
        self._awaited_after_backward: list[float] = []

    def record(self, step: Callable[[Mark], None]) -> Recording:
        self._running = True
        step(lambda part, of_host=False: None)
        self._end_backward()
        self._running = False
        return self.recording

    def _kernel(self, name: str, cost: Cost) -> None:
        known = self.recording.costs
        self._note(RUN, self._stream(self._current[-1]), known.setdefault(cost, len(known)))

    def collective(self, name: str, nbytes: int, ranks: Sequence[int], group: str) -> float:
        if not self._running:
            return 0.0
        known = self.recording.collectives
        index = known.setdefault((name, nbytes, ranks), len(known))
        self._note(SEND, self._stream(f"collectives {group}"), self._stream(self._current[-1]), index)
        return self._stamp()

    def free(self, stream: str) -> float:
        if not self._running:
            return 0.0
        self._note(STAMP, self._stream(stream))
        return self._stamp()

    def wait(self, until: float, stream: str | None = None) -> None:
        if isinstance(until, _Stamp):
            self._note(AWAIT, self._stream(self._current[-1] if stream is None else stream), until.number)

    def host_waits(self, until: float) -> None:
        if isinstance(until, _Stamp):
            self._note(HOST_AWAITS, until.number)

    def synchronize(self) -> None:
        if self._running:
            self._end_backward()
            self._note(SYNCHRONIZE)

    def wait_after_backward(self, tensors: Sequence[Tensor]) -> None:
        self._awaited_after_backward += [self._reduced.get(each.data_ptr(), 0.0) for each in tensors]

    def _end_backward(self) -> None:
        for moment in self._awaited_after_backward:
            self.wait(moment, FIRST_STREAM)
        self._awaited_after_backward = []

    def _launched(self, in_backward: bool) -> None:
        """Note a launch. Those with nothing between them are one event: so many in forward, so many in backward."""
        events = self.recording.events
        before = events.pop() if events and events[-1][0] == LAUNCH else (LAUNCH, 0, 0, 0)
        self._note(LAUNCH, before[1] + (not in_backward), before[2] + in_backward)

    def _note(self, kind: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.recording.events.append((kind, int(a), b, c))

    def _stream(self, name: str) -> int:
        return self.recording.streams.setdefault(name, len(self.recording.streams))

    def _stamp(self) -> float:
        self._stamps += 1
        return _Stamp(self._stamps - 1)


class _Stamp(float):
    """A moment that the recording knows by its number."""

    @property
    def number(self) -> int:
        return int(self)


def recorded(make: Callable[[], Callable[[Mark], None]], ranks: int, on: Hardware) -> Recording:
    """Record the step that `make` returns, on the first of `ranks`."""
    recorder = _Recorder()
    with simulation(ranks, on=on, schedule=recorder):
        return recorder.record(make())
