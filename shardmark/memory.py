"""Bytes live and bytes at the peak, by phase: the CUDA allocator's statistics or the CPU allocator's own events.

    with meter("cpu") as memory:
        x = torch.randn(1000)
        memory.mark("after_init")
        y = x * x
        memory.mark("after_forward")
    memory.phases  # {"after_init": 4000, "after_forward": 8000}
    memory.peak    # 8000

On CPU the profiler reports every allocation and release of PyTorch's allocator, so the figures are exact to the byte;
what is allocated in another thread (a Gloo worker, say) or by a library for itself is not PyTorch's, and is not seen.
On CUDA they are the bytes requested from the caching allocator, before it rounds them up; workspaces it keeps for
libraries are in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

_MARK = "shardmark_mark:"


@dataclass
class Memory:
    """What one metered pass held, in bytes: live at the end of each phase, and at the peak."""

    phases: dict[str, int] = field(default_factory=dict)
    peak: int = 0


class Meter(Memory):
    """A running meter; `phases` and `peak` are filled in when its `with` block ends."""

    def mark(self, phase: str) -> None:
        """The bytes live now belong to `phase`."""
        raise NotImplementedError

    def reset_peak(self) -> None:
        """Forget the peak so far: the measured step begins here."""
        raise NotImplementedError


@contextmanager
def meter(device: str) -> Iterator[Meter]:
    """Meter what the block allocates on `device` ("cpu" or "cuda"), from zero at its start."""
    running: _CpuMeter | _CudaMeter = _CudaMeter() if device == "cuda" else _CpuMeter()
    with running.recording():
        yield running
    running.read()


class _CudaMeter(Meter):
    def _live(self, which: str = "current") -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self._base = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()

    def mark(self, phase: str) -> None:
        self.phases[phase] = self._live() - self._base

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> None:
        self.peak = self._live("peak") - self._base


class _CpuMeter(Meter):
    @contextmanager
    def recording(self) -> Iterator[None]:
        with profile(profile_memory=True) as self._profile:
            yield

    def mark(self, phase: str) -> None:
        with record_function(_MARK + phase):
            pass

    def reset_peak(self) -> None:
        self.mark("")

    def read(self) -> None:
        live = 0
        # Events carry the time they began at; the sort is stable, so those of one nanosecond keep their order.
        for event in sorted(self._profile.kineto_results.events(), key=lambda event: event.start_ns()):
            name = event.name()
            if name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                live += event.nbytes()
                self.peak = max(self.peak, live)
            elif name == _MARK:
                self.peak = live
            elif name.startswith(_MARK):
                self.phases[name.removeprefix(_MARK)] = live


def available_bytes(device: str) -> int:
    """Bytes that a new case could still allocate: free on the current GPU, or available to this process in RAM."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    return min([machine, *_cgroup_room()])


def _cgroup_room() -> Iterator[int]:
    """Bytes left under the control group's limit, where a container has one (cgroup v2)."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            yield int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` is the allocator's "no more", on CUDA or on CPU (where it is a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error) or "can't allocate memory" in str(error)
    )
