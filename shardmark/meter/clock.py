"""The device clock that pytest-benchmark reads, and the stopwatch whose readings advance it.

pytest-benchmark takes a `timer` and calls it before and after what it measures. The device clock stands still until a
test advances it by a time measured elsewhere: CUDA events on a GPU, the slowest rank's time for a step on a world. So
every time goes through pytest-benchmark's public interface, and its statistics, compare and histogram keep working.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch


class DeviceClock:
    """A timer in seconds that moves only when a test advances it; pytest-benchmark takes it as `timer=clock`."""

    __name__ = "device_clock"  # pytest-benchmark writes the timer's name into its JSON

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self.now

    def reset(self) -> None:
        """Set the time to zero, so that the next difference has no rounding error from earlier times."""
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if not seconds >= 0:
            raise ValueError(f"the device clock cannot advance by {seconds} s")
        self.now += seconds


@dataclass
class Laps:
    """One timed step, in seconds: the total, and its parts in the order in which they ended."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    host: float | None = None
    """On CUDA, the host's seconds to launch the step, including waits for the device inside it."""
    calls: int = 1
    """Steps that the measurement took back to back; all figures are those of one."""

    @property
    def elapsed(self) -> float:
        """Seconds of the whole measurement."""
        return self.seconds * self.calls

    def at_pace(self, pace: float) -> Laps:
        """The same step on a machine that is `pace` times as fast."""
        parts = {name: seconds / pace for name, seconds in self.parts.items()}
        return Laps(self.seconds / pace, parts, None if self.host is None else self.host / pace, self.calls)

    def of_each(self, calls: int) -> Laps:
        """One of so many steps that were timed together."""
        return replace(self.at_pace(calls), calls=calls)


MEETING = 1e-4
"""The host's seconds, at most, to launch a collective in which the devices meet."""

MOST_AHEAD = 0.02
"""Most seconds of a spin: a longer step hides its launches itself, or waits for the device on the way."""


class Stopwatch:
    """Time one step on a device, part by part.

    On CPU the marks are `perf_counter`. On CUDA they are events on the current stream, so nothing waits until `stop`.
    There the device first spins for `ahead` seconds, the time that the host takes to launch the step: the step's
    kernels are queued when the device reaches the first event. On an idle device each kernel would start as it is
    launched, and a step of many small kernels would take as long as Python does.

    Work on another stream that does not wait for the current one runs during the spin and is not timed. Make the
    stopwatch before ranks meet in a barrier: the first one on a GPU measures how long a spin is.
    """

    def __init__(self, device: str, ahead: float = 0.0) -> None:
        self.device = device
        self._spin = int(min(ahead, MOST_AHEAD) * _cycles_per_second()) if device == "cuda" and ahead else 0
        self._began = 0.0
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def start(self, meet: Callable[[], None] | None = None) -> None:
        """Begin. Work that was queued on the device before is not counted.

        On CUDA `meet` is called first, and queues a tiny collective: the ranks' hosts leave a barrier some tens of
        microseconds apart, in which a collective of 4 KB is over. So the devices meet, not the hosts alone.
        """
        if self.device == "cuda":
            torch.cuda.synchronize()
            if self._spin:
                torch.cuda._sleep(self._spin)
            if meet is not None:
                meet()
        self._began = time.perf_counter()
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """End a part called `part`; the next part begins."""
        self._marks.append((part, self._now()))

    def stop(self) -> Laps:
        """End, wait for the device, and read the clock. Time after the last mark counts in the total only."""
        last, host = self._now(), None
        if self.device == "cuda":
            host = time.perf_counter() - self._began
            torch.cuda.synchronize()
        parts: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            parts[part] = parts.get(part, 0.0) + _seconds(before, after)
        return Laps(_seconds(self._marks[0][1], last), parts, host)

    def _now(self) -> torch.cuda.Event | float:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@cache
def _cycles_per_second() -> float:
    """The rate of the counter that `torch.cuda._sleep` reads, measured: on some GPUs it is not the clock rate."""
    cycles = 1_000_000
    torch.cuda._sleep(cycles)  # the first one loads the kernel
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    torch.cuda.synchronize()
    return cycles / _seconds(began, ended)


def _seconds(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
    return before.elapsed_time(after) / 1e3
