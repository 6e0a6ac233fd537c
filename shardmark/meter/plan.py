"""The request to a rank and its answer: the plan of a measurement, and one rank's measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shardmark.api.registry import Implementation
from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory, Meter
from shardmark.verdict.budget import Limits, MemoryBudget

if TYPE_CHECKING:
    from shardmark.meter.counters import Counters
    from shardmark.meter.gpu import GpuFigures

IMPLEMENTATION, PEER, LOAD = "implementation", "peer", "load"
COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Rounds:
    """The number of rounds, as pytest-benchmark's options set it."""

    minimum: int = 5
    maximum: int = 100
    max_seconds: float = 1.0
    """Rounds go on past the minimum until the implementation's steps took this long; while a verdict is undecided, many
    times as long (`shardmark.meter.measure_case.PATIENCE`)."""
    warmups: int = 1
    max_warmup_seconds: float = math.inf
    disable_gc: bool = False

    def count(self, seconds: float) -> int:
        """Rounds for a step that takes about `seconds`."""
        wanted = math.ceil(self.max_seconds / max(seconds, 1e-9))
        return max(self.minimum, min(self.maximum, wanted))


@dataclass(frozen=True)
class Identity:
    """The identity of a row, known before anything is measured."""

    family: str
    implementation: str
    case: Any
    device: str
    world_size: int = 1
    backend: str | None = None
    """Known once a rank has made its workload."""
    called: str = ""
    """The implementation in words; empty: its name."""


@dataclass(frozen=True)
class Plan:
    """The request to a rank: what to run, how often, and what else to observe."""

    workload: type[Any]  # a Workload
    implementation: Implementation
    peer: Implementation | None
    case: Any
    device: str
    world_size: int
    rounds: Rounds = Rounds()
    memory: MemoryBudget | None = None
    """The budget of tensors at the peak."""
    tensors_before: int | None = None
    """Bytes of tensors at the peak in the older row that this one is compared with."""
    limits: Limits | None = None
    """The limits that the rounds must decide."""
    observers: tuple[type[RankObserver], ...] = ()
    coin: int = 0
    """Seed of the order of steps in each round, equal on all ranks."""
    rates: bool = False
    """Whether the row states a rate: the GPU is warmed up, and a step that is timed alone finds its L2 cache cold."""
    load: bool = False
    """Whether each round times the calibration load too (`shardmark.meter.load`)."""
    trace: Path | None = None
    """The path of the Chrome trace and the memory snapshot, without the rank and the suffix."""

    @property
    def identity(self) -> Identity:
        implementation = self.implementation
        family, name = implementation.family, implementation.name
        return Identity(family, name, self.case, self.device, self.world_size, called=implementation.called)


class RankObserver:
    """The part of an observer that runs on ranks. Only the class is sent to the ranks. An instance's attributes are for
    the row, which is filled in pytest's process (`shardmark.rows.observers`).

    `needs` names methods that the workload must have. `timed` maps the names of laps to methods that are timed in the
    same rounds as the step.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    timed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[Any]:
        """A context for the whole measurement."""
        return nullcontext()

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Called in the metered pass, once the workload is made and prepared."""

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> Any:
        """The observer's own pass, after the timed rounds. The result becomes `measured.observed[cls]`."""


@dataclass
class Measured:
    """One rank's measurements: memory, and the rounds of the implementation, its peer, and its parts alone."""

    backend: str
    memory: Memory
    laps: dict[str, list[Laps]] = field(default_factory=dict)
    first_step: float | None = None
    """Seconds of the first step, under the memory meter, which adds little if the step compiles."""
    host: float | None = None
    """On CUDA, the host's seconds to launch the last warm-up; in rounds it may wait for the device."""
    waited: float = 0.0
    """Share of the timed rounds for which this rank's threads were ready to run and had no core."""
    gpu: GpuFigures | None = None
    """This rank's GPU through the timed rounds; None on CPU, and without NVML."""
    counters: Counters | None = None
    """Counts of one more step, after all rounds."""
    observed: dict[type[RankObserver], Any] = field(default_factory=dict)
    """Results of the observers' own passes on this rank."""

    def at_pace(self, pace: float) -> Measured:
        """A copy with the times of a machine that is `pace` times as fast (`shardmark.rows.case_times`)."""
        laps = {name: [lap.at_pace(pace) for lap in each] for name, each in self.laps.items()}
        first_step = None if self.first_step is None else self.first_step / pace
        return replace(self, laps=laps, first_step=first_step, host=None if self.host is None else self.host / pace)

    @classmethod
    def once(cls, backend: str, memory: Memory, laps: list[Laps]) -> Measured:
        """Measurements of something done once: bytes after each stage and at the peak, and times."""
        reported = Memory(peak=memory.peak, tensors=memory.tensors, workspace=memory.workspace, stages=memory.stages)
        return cls(backend, reported, {IMPLEMENTATION: laps})
