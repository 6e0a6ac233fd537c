"""Every block of memory that was allocated and released while recording, in order, and who allocated it.

    with recording("cpu") as recorded:
        ...
    for event in recorded.replay(): ...

A block is workspace if one of PyTorch's operators took it and gave it back before it returned: oneDNN's accumulators, a
fused kernel's tiles. So is what cuBLAS took within one and keeps. How much that is depends on the processor and on the
library. All other blocks are tensors.

A release by another thread than the allocating one is not reported. But what lies where a new block is given out must
have been released; and what a functional collective takes for itself, as Gloo copies what it reduces to scatter, is
gone by the time that its result has been waited for, whichever thread releases it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function

_MARK = "shardmark_mark:"
_END = "end"
"""The mark after which libraries give back what they keep."""
_WAITED = "waited "
"""What the mark begins with that says, by its address, which functional collective's result has been waited for."""

_HISTORY = 10_000_000
"""Allocations and releases that the CUDA allocator remembers for a recording: more than any has."""

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines at every use


def mark(name: str) -> None:
    """Leave `name` in the recording, at this moment."""
    with record_function(_MARK + name):
        pass


def mark_waited(result: torch.Tensor) -> None:
    """Leave in the recording that the functional collective which gave `result` is done."""
    mark(f"{_WAITED}{result.data_ptr()}")


@dataclass(eq=False)
class Block:
    """One allocation. `module` is the range it was made in (see `shardmark.trace`), `operator` what ran there."""

    nbytes: int
    address: int
    module: str = ""
    operator: str = ""
    kind: str = ""
    workspace: str = ""
    """The operator that took the block and gave it back before it returned; empty for a tensor."""


@dataclass(frozen=True)
class Allocated:
    """`block` is live from here on."""

    block: Block


@dataclass(frozen=True)
class Released:
    """`block` is no longer live."""

    block: Block


@dataclass(frozen=True)
class Marked:
    """Here `mark(name)` was called."""

    name: str


Event = Allocated | Released | Marked


class Recording:
    """What `recording` has recorded, once it has ended."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._profile = profile(profile_memory=True)
        self.requested: dict[int, deque[int]] = {}
        """Bytes asked for at each address, in order; without an entry they are as the profiler saw them."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what the block does."""
        _have_libraries_give_back(self.device)  # or a later recording would not see what an earlier one had them take
        with self._profile, _requests_remembered(self.device) as self.requested:
            yield
            mark(_END)
            _have_libraries_give_back(self.device)

    def replay(self) -> list[Event]:
        """What happened to memory on the device, in the order it did."""
        assert self._profile.kineto_results is not None, "the recording has not ended"
        roots = self._profile.kineto_results.experimental_event_tree()
        return _replayed(roots, self.device, {address: deque(sizes) for address, sizes in self.requested.items()})


@contextmanager
def recording(device: str) -> Iterator[Recording]:
    """Record every allocation of the block on `device` ("cpu" or "cuda")."""
    recorded = Recording(device)
    with recorded.running():
        yield recorded


def _replayed(roots: list[Any], device: str, requested: dict[int, deque[int]]) -> list[Event]:
    """The events below `roots`; sizes are those `requested` at each address in turn, where they are known."""
    live, taken_by, collectives = _Live(), dict[Block, Any](), _Collectives()
    replayed: list[Event] = []
    ended = False
    events, modules = _in_order(roots)
    for event, within in events:
        what, fields = event.typed
        if what == _EventType.Allocation and fields.device.type == device:
            if fields.alloc_size < 0:
                if released := live.pop(fields.ptr):  # a block from before the recording is not ours
                    taker = taken_by[released]
                    if taker is not None and (ended or within.operator is taker):
                        released.workspace = taker.name
                    replayed.append(Released(released))
                continue
            sizes = requested.get(fields.ptr)
            block = Block(sizes.popleft() if sizes else fields.alloc_size, fields.ptr, *_owner(event, modules))
            for gone in live.overlapping(block):
                live.pop(gone.address)
                replayed.append(Released(gone))
            live.add(block)
            taken_by[block] = within.operator
            collectives.take(block, within)
            replayed.append(Allocated(block))
        elif event.name == _MARK + _END:
            ended = True
        elif event.name.startswith(_MARK + _WAITED):
            for result in live.overlapping(Block(1, int(event.name.removeprefix(_MARK + _WAITED)))):
                for block in collectives.end(result):
                    if live.holds(block):
                        live.pop(block.address)
                        replayed.append(Released(block))
        elif event.name.startswith(_MARK):
            replayed.append(Marked(event.name.removeprefix(_MARK)))
    return replayed


def _have_libraries_give_back(device: str) -> None:
    """Free cuBLAS's workspaces: one for each thread and stream that multiplied, which it would keep."""
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _requests_remembered(device: str) -> Iterator[dict[int, deque[int]]]:
    """Bytes that were requested of the CUDA allocator at each address, in order; the profiler sees them rounded up.

    They are there once the block has ended; on CPU there are none, as nothing is rounded.
    """
    requested: dict[int, deque[int]] = defaultdict(deque)
    if device != "cuda":
        yield requested
        return
    torch.cuda.memory._record_memory_history(context=None, max_entries=_HISTORY, clear_history=True)
    try:
        yield requested
        entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    for entry in entries:
        if entry["action"] == "alloc":
            requested[entry["addr"]].append(entry["size"])


class _Live:
    """The blocks that are live, by address: none overlaps another."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # in order

    def add(self, block: Block) -> None:
        self._blocks[block.address] = block
        insort(self._addresses, block.address)

    def holds(self, block: Block) -> bool:
        """Whether it is live."""
        return self._blocks.get(block.address) is block

    def pop(self, address: int) -> Block | None:
        block = self._blocks.pop(address, None)
        if block is not None:
            del self._addresses[bisect_left(self._addresses, address)]
        return block

    def overlapping(self, block: Block) -> list[Block]:
        """Those that lie, in part or whole, where `block` does: at most one of them begins before it."""
        first = max(0, bisect_right(self._addresses, block.address) - 1)
        last = bisect_left(self._addresses, block.address + block.nbytes)
        near = (self._blocks[address] for address in self._addresses[first:last])
        return [old for old in near if old.address + old.nbytes > block.address]


@dataclass(frozen=True)
class _Within:
    """The events that one is part of: a library operator, a functional collective, and that one's call of a backend."""

    operator: Any = None
    collective: Any = None
    backend: Any = None


class _Collectives:
    """What functional collectives took: each one's result, and what its backend has while it is under way."""

    def __init__(self) -> None:
        self._by_result: dict[Block, Any] = {}
        self._of_backend: dict[Any, list[Block]] = defaultdict(list)

    def take(self, block: Block, within: _Within) -> None:
        """The block was allocated there."""
        if within.backend is not None:
            self._of_backend[within.collective].append(block)
        elif within.collective is not None:
            self._by_result[block] = within.collective

    def end(self, result: Block) -> list[Block]:
        """What the backend of the collective that gave `result` took."""
        return self._of_backend.pop(self._by_result.pop(result, None), [])


def _in_order(roots: list[Any]) -> tuple[list[tuple[Any, _Within]], dict[int, str]]:
    """Every event below `roots` by the time it began, with what it is part of; and by its autograd sequence number the
    module of an operator."""
    events: list[tuple[Any, _Within]] = []
    modules: dict[int, str] = {}
    stack = [(root, "", _Within()) for root in roots]
    while stack:
        event, module, within = stack.pop()
        what, fields = event.typed
        if what == _EventType.TorchOp:
            if fields.scope == RecordScope.USER_SCOPE:
                module = event.name
            elif fields.scope == RecordScope.FUNCTION and module and fields.sequence_number >= 0:
                modules.setdefault(fields.sequence_number, module)
            if within.operator is None and event.name in _with_kernels():
                within = replace(within, operator=event)
            elif event.name.startswith("_c10d_functional::"):
                within = replace(within, collective=event)
            elif within.collective is not None and event.name.startswith("c10d::"):
                within = replace(within, backend=event)
        events.append((event, within))
        stack.extend((child, module, within) for child in event.children)
    return sorted(events, key=lambda pair: (pair[0].start_time_ns, pair[0].id)), modules


@cache
def _with_kernels() -> frozenset[str]:
    """PyTorch's own operators, such as "aten::mm", that have a kernel and are not merely made of other operators.

    What a composite one (matmul, linear, SDPA's math backend) allocates between its parts are tensors, as they would be
    if its caller had called the parts. So are those of an operator from elsewhere: they are what its author decided.
    """
    composite = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    own = (name for name in torch._C._dispatch_get_all_op_names() if name not in composite)
    named = (name.partition(".") for name in own if name.startswith("aten::"))
    return frozenset(name for name, _, overload in named if "out" not in overload.split("_"))


def _owner(event: Any, modules: dict[int, str]) -> tuple[str, str]:
    """The innermost range around an allocation, or in backward the one of the operator whose gradient it is; and the
    outermost operator within it."""
    operator = ""
    parent = event.parent
    while parent is not None:
        what, fields = parent.typed
        if what == _EventType.TorchOp:
            if fields.scope == RecordScope.USER_SCOPE:
                return parent.name, operator
            operator = parent.name
            if fields.scope == RecordScope.BACKWARD_FUNCTION:
                return modules.get(fields.sequence_number, ""), operator
        parent = parent.parent
    return "", operator
