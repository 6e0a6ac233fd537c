"""Every block of memory that was allocated and released under the profiler, in order, and who allocated it.

    with profile(profile_memory=True) as recording:
        ...
    for event in replay(recording, "cpu"): ...

A release by another thread than the allocating one is not reported, but what lies where a new block is given out must
have been released; so the bytes live are exact wherever one thread allocates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function

_MARK = "shardmark_mark:"


def mark(name: str) -> None:
    """Leave `name` in the recording, at this moment."""
    with record_function(_MARK + name):
        pass


@dataclass(eq=False)
class Block:
    """One allocation. `module` is the range it was made in (see `shardmark.trace`), `operator` what ran there."""

    nbytes: int
    address: int
    module: str = ""
    operator: str = ""
    kind: str = ""


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


def replay(recording: profile, device: str) -> Iterator[Event]:
    """What happened to memory on `device` ("cpu" or "cuda"), in the order it did."""
    assert recording.kineto_results is not None, "the recording has not ended"
    live = _Live()
    events, modules = _in_order(recording.kineto_results.experimental_event_tree())
    for event in events:
        what, fields = event.typed
        if what == _EventType.Allocation and fields.device.type == device:
            if fields.alloc_size < 0:
                if released := live.pop(fields.ptr):  # a block from before the recording is not ours
                    yield Released(released)
                continue
            block = Block(fields.alloc_size, fields.ptr, *_owner(event, modules))
            for gone in live.overlapping(block):
                live.pop(gone.address)
                yield Released(gone)
            live.add(block)
            yield Allocated(block)
        elif event.name.startswith(_MARK):
            yield Marked(event.name.removeprefix(_MARK))


class _Live:
    """The blocks that are live, by address: none overlaps another."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # in order

    def add(self, block: Block) -> None:
        self._blocks[block.address] = block
        insort(self._addresses, block.address)

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


def _in_order(roots: list[Any]) -> tuple[list[Any], dict[int, str]]:
    """Every event below `roots` by the time it began, and by its autograd sequence number the module of an operator."""
    events: list[Any] = []
    modules: dict[int, str] = {}
    stack = [(root, "") for root in roots]
    while stack:
        event, module = stack.pop()
        events.append(event)
        what, fields = event.typed
        if what == _EventType.TorchOp:
            if fields.scope == RecordScope.USER_SCOPE:
                module = event.name
            elif fields.scope == RecordScope.FUNCTION and module and fields.sequence_number >= 0:
                modules.setdefault(fields.sequence_number, module)
        stack.extend((child, module) for child in event.children)
    return sorted(events, key=lambda event: (event.start_time_ns, event.id)), modules


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
