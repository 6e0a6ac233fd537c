"""Bytes live and bytes at the peak, by phase: the CUDA allocator's statistics or the CPU allocator's own events.

    with meter("cpu") as memory:
        x = torch.randn(1000)
        memory.mark("after_init")
        y = x * x
        memory.mark("after_forward")
    memory.phases     # {"after_init": 4000, "after_forward": 8000}
    memory.peak       # 8000
    memory.tensors    # 8000
    memory.workspace  # Workspace(nbytes=0, operator="")

A peak has two parts. Tensors are what the technique allocates, equal on every machine. Workspace is what a library
allocates inside one operator and frees before it returns (`shardmark.meter.recording`); it depends on the processor.

On CPU the profiler reports every allocation and release of PyTorch's allocator, so the figures are exact to the byte;
memory that a library allocates for itself, such as Gloo's scratch space, is not seen. On CUDA the figures are
the bytes requested from the caching allocator, before it rounds them up.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shardmark.api.workload import stage_listeners
from shardmark.meter.allocations import ALLOCATOR, Allocated, Event, Marked, Released
from shardmark.meter.gloo_workers import workers_free_first
from shardmark.meter.recording import mark, recording
from shardmark.ranks.process_setup import return_freed_memory

PHASE, PEAK, STAGE, RESET = "phase ", "peak of ", "stage ", "reset"
"""Prefixes of the meter's marks: the end of a phase, a step's peak, the end of a stage, a reset of the peak."""


@dataclass(frozen=True)
class Workspace:
    """The most bytes that one operator allocated and freed before it returned, and that operator."""

    nbytes: int = 0
    operator: str = ""


@dataclass(frozen=True)
class Stage:
    """Bytes at the end of a stage: live, the peak since the meter began, and (CUDA alone) reserved by the caching
    allocator."""

    live: int
    peak: int
    reserved: int | None = None


@dataclass
class Memory:
    """Bytes of one metered pass: live at the end of each phase, and at the peak."""

    phases: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors: a workspace that a library keeps is not among them."""
    peak: int = 0
    """Peak of tensors and workspace together."""
    tensors: int = 0
    """Peak of tensors alone, which formulas give."""
    workspace: Workspace = Workspace()
    peaks: dict[str, int] = field(default_factory=dict)
    """The peak of tensors in each of the first steps, by name."""
    stages: dict[str, Stage] = field(default_factory=dict)
    """Stages that the workload reports while it is made and warmed up."""
    allocated: int = 0
    """CUDA alone: the most bytes of the caching allocator's blocks, rounded up, in the steady-state step."""
    reserved: int = 0
    """CUDA alone: the most bytes that the caching allocator took from the device."""
    reserved_at_most: int = 0
    """A simulation alone: the same, if no stream is ever ahead of what the host has waited for."""
    host: int = 0
    """A simulation of a GPU alone: peak of the tensors that the program has put in the host's memory."""
    pinned: int = 0
    """The same of the pinned ones, each rounded up to a power of two, as PyTorch's allocator of pinned memory does."""


class Meter(Memory):
    """A running meter. Its figures are filled in when its `with` block ends."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._kept: dict[str, int] = {}
        """Workspace that libraries keep at the end of a phase or stage."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meter the block."""
        with workers_free_first(self._device), recording(self._device) as self._recorded:
            yield

    def mark(self, phase: str) -> None:
        """`phase` ends here."""
        mark(PHASE + phase)

    def reset_peak(self) -> None:
        """Forget the peak so far: the measured step begins here."""
        mark(RESET)

    def keep_peak(self, step: str) -> None:
        """Store the peak of tensors since the last reset as that of `step`."""
        mark(PEAK + step)

    def stage(self, name: str) -> None:
        """A stage of that name ends here."""
        mark(STAGE + name)

    def read(self) -> None:
        """Fill in the figures from the recording."""
        self.follow(self._recorded.replay())

    def follow(self, events: list[Event]) -> None:
        """Fill in the figures from the events."""
        live = _Live()
        for event in events:
            match event:
                case Allocated() | Released():
                    live.follow(event)
                case Marked(name) if name == RESET:
                    live.begin_again()
                case Marked(name) if name.startswith(PEAK):
                    self.peaks[name.removeprefix(PEAK)] = live.peak_of_tensors
                case Marked(name) if name.startswith(STAGE):
                    self._kept[name] = live.total - live.tensors
                    self.stages[name.removeprefix(STAGE)] = Stage(live.tensors, live.most)
                case Marked(name) if not name.startswith(ALLOCATOR):
                    self._kept[name] = live.total - live.tensors
                    self.phases[name.removeprefix(PHASE)] = live.tensors
        self.peak, self.tensors, self.workspace = live.peak, live.peak_of_tensors, live.largest_workspace


class _Live:
    """Bytes live while a recording is replayed, and the most since its start and since the last reset."""

    def __init__(self) -> None:
        self.total = self.tensors = self.most = 0
        self._taken: dict[str, int] = defaultdict(int)  # workspace by operator
        self.begin_again()

    def begin_again(self) -> None:
        self.peak, self.peak_of_tensors = self.total, self.tensors
        held = (Workspace(nbytes, operator) for operator, nbytes in self._taken.items() if nbytes)
        self.largest_workspace = max(held, key=lambda workspace: workspace.nbytes, default=Workspace())

    def follow(self, event: Allocated | Released) -> None:
        nbytes = event.block.nbytes if isinstance(event, Allocated) else -event.block.nbytes
        self.total += nbytes
        if operator := event.block.workspace:
            self._taken[operator] += nbytes
            self.largest_workspace = max(
                self.largest_workspace,
                Workspace(self._taken[operator], operator),
                key=lambda workspace: workspace.nbytes,
            )
        else:
            self.tensors += nbytes
        self.most, self.peak = max(self.most, self.total), max(self.peak, self.total)
        self.peak_of_tensors = max(self.peak_of_tensors, self.tensors)


@contextmanager
def meter(device: str) -> Iterator[Meter]:
    """Meter the block's allocations on `device` ("cpu" or "cuda"), from zero at its start."""
    running = METERS[device](device)
    with running.running():
        stage_listeners.append(running.stage)
        try:
            yield running
        finally:
            stage_listeners.remove(running.stage)
    running.read()


class _CudaMeter(Meter):
    """Takes phases, stages and the peak from the statistics of CUDA's caching allocator. There a block that a side
    stream still reads is live; in a recording it is freed."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._phases: dict[str, int] = {}
        self._stages: dict[str, Stage] = {}

    def _live(self, which: str = "current") -> int:
        return torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0)  # empty until the first allocation

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():  # first of all, libraries free what they kept
            torch.cuda.synchronize()
            self._base = self._live()
            torch.cuda.reset_peak_memory_stats()
            yield
            torch.cuda.synchronize()

    def mark(self, phase: str) -> None:
        super().mark(phase)
        self._phases[phase] = self._live() - self._base

    def reset_peak(self) -> None:
        super().reset_peak()
        torch.cuda.reset_peak_memory_stats()

    def stage(self, name: str) -> None:
        super().stage(name)
        live, peak = self._live() - self._base, self._live("peak") - self._base
        peak = max([peak, *(stage.peak for stage in self._stages.values())])
        self._stages[name] = Stage(live, peak, torch.cuda.memory_reserved())

    def read(self) -> None:
        super().read()
        self.phases = {name: live - self._kept[PHASE + name] for name, live in self._phases.items()}
        self.stages = {
            name: replace(stage, live=stage.live - self._kept[STAGE + name]) for name, stage in self._stages.items()
        }
        self.peak = self._live("peak") - self._base
        self.allocated, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


METERS = {"cpu": Meter, "cuda": _CudaMeter}
"""Class of meter by device."""


def release(device: str) -> None:
    """Free garbage, and the allocators' free blocks, for other ranks and cases."""
    gc.collect()
    return_freed_memory()
    if device == "cuda":
        torch.cuda.empty_cache()


FRAGMENTED = 0.06
"""The share of a GPU's free memory that tensors cannot fill: the caching allocator rounds blocks up to 512 bytes, or
2 MiB if large, and leaves gaps between them."""


def available_bytes(device: str) -> int:
    """Bytes that a new case could still allocate: on the current GPU, or in RAM for this process."""
    release(device)
    if device == "cuda":
        return math.floor((1 - FRAGMENTED) * torch.cuda.mem_get_info()[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    return min([machine, *_cgroup_room()])


def _cgroup_room() -> Iterator[int]:
    """Bytes left under the container's limit, if it has one (cgroup v2)."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # the page cache gives way
            yield int(limit) - used
    except (OSError, ValueError, KeyError):
        return


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` says that memory ran out, on CUDA or on CPU (a RuntimeError there)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
