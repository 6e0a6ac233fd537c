"""Record every block of memory that is allocated or released, in order, and who allocated it.

    with recording("cpu") as recorded:
        ...
    for event in recorded.replay(): ...

A block is workspace if one of PyTorch's operators allocated it and freed it before it returned: oneDNN's accumulators,
a fused kernel's tiles. cuBLAS's workspaces count as workspace too, though cuBLAS keeps them. The size of workspace
depends on the processor and the library. All other blocks are tensors.

The profiler does not report a release by another thread than the one that allocated. Two rules find these releases. A
block is free once a new one is allocated at its address. A functional collective's own blocks, such as Gloo's copy of a
reduce-scatter's input, are free once its result has been waited for.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.autograd.profiler import profile, record_function

from shardmark.meter.allocations import END, MARK, WAITED, Event, Marked, replayed

_HISTORY = 10_000_000
"""Allocations and releases that the CUDA allocator remembers for a recording; no recording has more."""


def mark(name: str) -> None:
    """Leave `name` in the recording at this moment."""
    with record_function(MARK + name):
        pass


def mark_waited(result: torch.Tensor) -> None:
    """Record that the functional collective which gave `result` has finished."""
    mark(f"{WAITED}{result.data_ptr()}")


@dataclass
class Recording:
    """A recording, to be replayed once it has ended."""

    device: str
    profiler: profile
    modules: dict[int, str] = field(default_factory=dict)
    """Module names by `id`, used where lines are recorded; otherwise the profiler's ranges name the modules."""
    requested: dict[int, deque[int]] = field(default_factory=dict)
    """Bytes requested at each address, in order; blocks at other addresses have the size that the profiler saw."""
    given_back: frozenset[int] = frozenset()
    """Addresses of the blocks that libraries kept and gave back at the end, which the profiler does not report on
    CUDA."""

    def replay(self) -> list[Event]:
        """Every allocation, release and mark on the device, in order; none of blocks that the program has put in the
        host's memory."""
        return of_device(self.replay_all())

    def replay_all(self) -> list[Event]:
        """As `replay`, with the blocks in the host's memory."""
        assert self.profiler.kineto_results is not None, "the recording has not ended"
        roots = self.profiler.kineto_results.experimental_event_tree()
        requested = {address: deque(sizes) for address, sizes in self.requested.items()}
        with no_gc():  # a collection would walk all events, again and again
            return replayed(roots, self.device, requested, self.modules, self.given_back)


def of_device(events: list[Event]) -> list[Event]:
    """The events without those of blocks in the host's memory."""
    return [event for event in events if isinstance(event, Marked) or not event.block.place]


@contextmanager
def without_operators() -> Iterator[None]:
    """Recordings in the block leave out operators without a range, which take most of a recording's time."""
    scopes = {RecordScope.USER_SCOPE}
    enabled = partial(profiler._enable_profiler, scopes=scopes)  # type: ignore[call-arg]  # as annotated
    with patch.object(profiler, "_enable_profiler", enabled):
        yield


@contextmanager
def no_gc() -> Iterator[None]:
    """Switch Python's garbage collection off in the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def recording(device: str, lines: bool = False) -> Iterator[Recording]:
    """Record every allocation on `device` ("cpu" or "cuda"); with `lines` also its Python line, which is slow."""
    recorded = Recording(device, profile(profile_memory=True, with_stack=lines))
    have_libraries_give_back(device)  # or this recording would not see workspaces that an earlier one left
    with recorded.profiler, _history_kept(recorded):
        yield recorded
        mark(END)


def have_libraries_give_back(device: str) -> None:
    """Free cuBLAS's workspaces: it keeps one for each thread and stream that ran a matrix product."""
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _history_kept(recorded: Recording) -> Iterator[None]:
    """Libraries give back their workspaces when the block ends; then the recording has the CUDA allocator's history:
    bytes requested at each address, in order, and addresses given back. On CPU the profiler reports both."""
    if recorded.device != "cuda":
        yield
        have_libraries_give_back(recorded.device)
        return
    torch.cuda.memory._record_memory_history(context=None, max_entries=_HISTORY, clear_history=True)
    try:
        yield
        before = _released()
        have_libraries_give_back(recorded.device)
        given_back = _released() - before
        entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    requested: dict[int, deque[int]] = defaultdict(deque)
    for entry in entries:
        if entry["action"] == "alloc":
            requested[entry["addr"]].append(entry["size"])
    released = [entry["addr"] for entry in entries if entry["action"] == "free_requested"]
    recorded.requested, recorded.given_back = requested, frozenset(released[len(released) - given_back :])


def _released() -> int:
    """Blocks that the CUDA allocator has taken back since the process began."""
    return torch.cuda.memory_stats().get("allocation.all.freed", 0)
