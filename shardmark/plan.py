"""What a rank is asked to measure, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardmark.budget import Limits
from shardmark.clock import Laps
from shardmark.kernels import StepProfile
from shardmark.memory import Memory
from shardmark.registry import Implementation
from shardmark.timeline import Timeline

Mark = Callable[[str], None]

IMPLEMENTATION, PEER, COMPUTE, COMMUNICATION = "implementation", "peer", "compute", "communication"


class Workload(Protocol):
    """One case made ready to run on one rank: `Workload(implementation, case, device)` makes its tensors and modules.

    `backend` names what runs underneath (a process-group backend, an attention kernel). A workload may also have
    `compute_step(mark)`: the same step without its communication, timed in the same rounds, so that what communication
    adds to the parts that it marks and the "communication" part together can be told, and `communication_step(mark)`:
    communication without the rest, of which the share that the step hid is told then; and `kinds()`: its live tensors
    by kind ("parameters", "gradients", "optimizer state"), so that every byte of the step can be told by kind. Where it
    says `cold = True`, its first steps are told apart: compiled from nothing, with the first one's time and each one's
    peak.
    """

    backend: str

    def __init__(self, implementation: Implementation, case: Any, device: str) -> None: ...

    def prepare(self) -> None:
        """What comes before each step and is not timed."""
        ...

    def step(self, mark: Mark) -> None:
        """The work. `mark(part)` ends a part of it: the stopwatch and the memory meter both listen."""
        ...


@dataclass(frozen=True)
class Rounds:
    """How often to measure, in the terms of pytest-benchmark's options."""

    minimum: int = 5
    maximum: int = 100
    max_seconds: float = 1.0
    """Rounds go on past the minimum until the implementation's own steps took this long; past the maximum only while
    a verdict is undecided."""
    warmups: int = 1
    max_warmup_seconds: float = math.inf
    disable_gc: bool = False

    def count(self, seconds: float) -> int:
        """Rounds for a step that takes about `seconds`."""
        wanted = math.ceil(self.max_seconds / max(seconds, 1e-9))
        return max(self.minimum, min(self.maximum, wanted))


@dataclass(frozen=True)
class Plan:
    """What a rank needs to know to measure a case."""

    workload: type[Any]  # a Workload
    implementation: Implementation
    peer: Implementation | None
    case: Any
    device: str
    world_size: int
    rounds: Rounds
    formula: int | None = None
    """What the peak in bytes should be."""
    limits: Limits | None = None
    """What the rounds are to decide."""
    profiled: bool = False
    """Whether one more step runs under the profiler."""
    trace: Path | None = None
    """Where its Chrome trace and memory snapshot go, but for the rank and the ending."""


@dataclass
class Measured:
    """What one rank measured: its memory, and the rounds of the implementation, its peer, and its parts alone."""

    backend: str
    memory: Memory
    laps: dict[str, list[Laps]] = field(default_factory=dict)
    profile: StepProfile | None = None
    timeline: Timeline | None = None
    first_step: float | None = None
    """Seconds of the first step where it compiles, from nothing; the memory meter that runs by then adds little."""
    files: list[Path] = field(default_factory=list)
    """The Chrome trace and the memory snapshot, where they were asked for."""
