"""What a rank is asked to measure, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardmark.budget import Limits, MemoryBudget
from shardmark.clock import Laps
from shardmark.memory import Memory
from shardmark.registry import Implementation

if TYPE_CHECKING:
    from shardmark.counters import Counters
    from shardmark.observers import Observer
    from shardmark.simulation.schedule import Step

Mark = Callable[[str], None]

IMPLEMENTATION, PEER, COMPUTE, COMMUNICATION = "implementation", "peer", "compute", "communication"


class Workload(Protocol):
    """One case made ready to run on one rank: `Workload(implementation, case, device)` makes its tensors and modules.

    `backend` names what runs underneath (a process-group backend, an attention kernel). What an observer needs beyond
    this, such as the kinds of the tensors, it says itself (`shardmark.observers`).
    """

    backend: str

    def __init__(self, implementation: Implementation, case: Any, device: str) -> None: ...

    def prepare(self) -> None:
        """What comes before each step and is not timed."""
        ...

    def step(self, mark: Mark) -> None:
        """The work. `mark(part)` ends a part of it, for the stopwatch and for the memory meter."""
        ...


@dataclass(frozen=True)
class Rounds:
    """How often to measure, in the terms of pytest-benchmark's options."""

    minimum: int = 5
    maximum: int = 100
    max_seconds: float = 1.0
    """Rounds go on past the minimum until the implementation's own steps took this long; and while a verdict is
    undecided, for many times as long (`shardmark.passes.PATIENCE`)."""
    warmups: int = 1
    max_warmup_seconds: float = math.inf
    disable_gc: bool = False

    def count(self, seconds: float) -> int:
        """Rounds for a step that takes about `seconds`."""
        wanted = math.ceil(self.max_seconds / max(seconds, 1e-9))
        return max(self.minimum, min(self.maximum, wanted))


@dataclass(frozen=True)
class Identity:
    """What a row is of: the part of it that is known before anything is measured."""

    family: str
    implementation: str
    case: Any
    device: str
    world_size: int = 1
    backend: str | None = None
    """Known once a rank has made its workload."""


@dataclass(frozen=True)
class Plan:
    """The request to a rank: what to run there, how often, and what else to observe."""

    workload: type[Any]  # a Workload
    implementation: Implementation
    peer: Implementation | None
    case: Any
    device: str
    world_size: int
    rounds: Rounds = Rounds()
    memory: MemoryBudget | None = None
    """What tensors at the peak are held to."""
    tensors_before: int | None = None
    """Bytes of them in the older row that this one is compared with, if there is one."""
    limits: Limits | None = None
    """What the rounds are to decide."""
    observers: tuple[type[Observer], ...] = ()
    """Their classes alone travel: what an observer was made with is for the row, which is filled where pytest runs."""
    coin: int = 0
    """What decides in which order the steps of each round are taken, the same on all ranks."""
    trace: Path | None = None
    """Where the Chrome trace and the memory snapshot go, but for the rank and the ending."""

    @property
    def identity(self) -> Identity:
        implementation = self.implementation
        return Identity(implementation.family, implementation.name, self.case, self.device, self.world_size)


@dataclass
class Measured:
    """What one rank measured: its memory, and the rounds of the implementation, its peer, and its parts alone."""

    backend: str
    memory: Memory
    laps: dict[str, list[Laps]] = field(default_factory=dict)
    first_step: float | None = None
    """Seconds of the first step, under the memory meter, which adds little where that step compiles."""
    host: float | None = None
    """Seconds that its host took to launch the last warm-up, on CUDA: in rounds it may wait for the device."""
    waited: float = 0.0
    """The share of the timed rounds for which its threads were ready to run and had no core."""
    counters: Counters | None = None
    """Of one more step, after all rounds."""
    observed: dict[type[Observer], Any] = field(default_factory=dict)
    """What each observer's own pass found on this rank."""
    steps: dict[str, Step] = field(default_factory=dict)
    """Of a simulation: when each operator of a step would run, by the hardware's name."""
