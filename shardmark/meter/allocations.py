"""The memory events of a profiler recording: each block from allocation to release, its owner, and its kind."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import (
    RecordScope,
    _ExtraFields_Allocation,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
)

MARK = "shardmark_mark:"

END = "end"
"""The mark that ends a recording; after it libraries free their workspaces."""

ALLOCATOR = "allocator: "
"""Prefix of marks that are not phases: the program's use of streams and of the caching allocator."""

STREAM = ALLOCATOR + "stream "
"""Prefix of the mark of a change of stream; the name of the stream follows, empty for the first one."""

EMPTY_CACHE = ALLOCATOR + "empty cache"
"""The mark of a call of `torch.cuda.empty_cache`."""

PLACE = ALLOCATOR + "place "
"""Prefix of the mark that blocks are in another memory from here on; `Block.place` follows."""

WAITED = "waited "
"""Prefix of the mark that a functional collective has been waited for; the address of its result follows."""

_FUNCTION, _BACKWARD, _OPENED = (
    int(scope)  # type: ignore[call-overload]  # an enumeration of C++
    for scope in (RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION, RecordScope.USER_SCOPE)
)
"""Scopes of operators, of the functions that autograd calls in backward, and of the ranges that Python opens."""


@dataclass(eq=False)
class Block:
    """One allocation. `module` is the innermost range around it, `operator` the outermost operator in that range."""

    nbytes: int
    address: int
    module: str = ""
    operator: str = ""
    kind: str = ""
    line: str = ""
    """The user's line that allocated it, as "file.py:7"; empty unless lines are recorded."""
    place: str = ""
    """"pinned" or "pageable" where a program has put it in the host's memory, beside a device; else empty."""
    workspace: str = ""
    """The operator that allocated the block, if it freed it before it returned or its library kept it until the end;
    empty for a tensor."""


@dataclass(frozen=True)
class Allocated:
    """`block` is live from here on."""

    block: Block


@dataclass(frozen=True)
class Released:
    """`block` is freed."""

    block: Block


@dataclass(frozen=True)
class Marked:
    """`mark(name)` was called here."""

    name: str


Event = Allocated | Released | Marked


def replayed(
    roots: list[Any],
    device: str,
    requested: dict[int, deque[int]],
    module_names: Mapping[int, str],
    given_back: Collection[int] = (),
) -> list[Event]:
    """The recording's events below `roots`, in order.

    A block's size is the next one `requested` at its address, if known, else the profiler's. Ranges name the modules. A
    recording of Python calls splits ranges: there the calls of modules whose `id` is in `module_names` name them.
    Blocks that are live at the end at the addresses `given_back` are workspace that a library kept.
    """
    live, taken_by, collectives = _Live(), dict[Block, Any](), _Collectives()
    replayed: list[Event] = []
    ended, place = False, ""
    events, modules, lines = _in_order(roots, module_names)
    for event, fields, within in events:
        if fields is not None:
            if fields.device.type != device:
                continue
            if fields.alloc_size < 0:
                if released := live.pop(fields.ptr):  # a block from before the recording is not ours
                    taker = taken_by[released]
                    if taker is not None and (ended or within.taker is taker):
                        released.workspace = taker.name
                    replayed.append(Released(released))
                continue
            sizes = requested.get(fields.ptr)
            nbytes = sizes.popleft() if sizes else fields.alloc_size
            module = within.range if within.backward is None else modules.get(within.backward, "")
            line = f"backward of {lines[within.backward]}" if within.backward in lines else within.line
            block = Block(nbytes, fields.ptr, module or within.module, within.operator, line=line, place=place)
            for gone in live.overlapping(block):
                live.pop(gone.address)
                replayed.append(Released(gone))
            live.add(block)
            taken_by[block] = within.taker
            collectives.take(block, within)
            replayed.append(Allocated(block))
        elif event.name == MARK + END:
            ended = True
        elif event.name.startswith(MARK + PLACE):
            place = event.name.removeprefix(MARK + PLACE)
        elif event.name.startswith(MARK + WAITED):
            for result in live.overlapping(Block(1, int(event.name.removeprefix(MARK + WAITED)))):
                for block in collectives.end(result):
                    if live.holds(block):
                        live.pop(block.address)
                        replayed.append(Released(block))
        elif event.name.startswith(MARK):
            replayed.append(Marked(event.name.removeprefix(MARK)))
    for address in given_back:
        kept = live.pop(address)
        if kept is not None and (taker := taken_by[kept]) is not None:
            kept.workspace = taker.name
            replayed.append(Released(kept))
    return replayed


class _Live:
    """The live blocks by address; none overlaps another."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # in order

    def add(self, block: Block) -> None:
        self._blocks[block.address] = block
        insort(self._addresses, block.address)

    def holds(self, block: Block) -> bool:
        return self._blocks.get(block.address) is block

    def pop(self, address: int) -> Block | None:
        block = self._blocks.pop(address, None)
        if block is not None:
            del self._addresses[bisect_left(self._addresses, address)]
        return block

    def overlapping(self, block: Block) -> list[Block]:
        """The live blocks that share an address with `block`: at most one of them begins before it."""
        first = max(0, bisect_right(self._addresses, block.address) - 1)
        last = bisect_left(self._addresses, block.address + block.nbytes)
        near = (self._blocks[address] for address in self._addresses[first:last])
        return [old for old in near if old.address + old.nbytes > block.address]


class _Within(NamedTuple):
    """The context of an event."""

    range: str = ""
    """The innermost one; empty in a backward function within it."""
    operator: str = ""
    """The outermost one in that range; in backward, the function that computes gradients."""
    backward: int | None = None
    """The autograd sequence number of that function; None in forward."""
    taker: Any = None
    """The outermost operator with a kernel."""
    collective: Any = None
    """The functional collective."""
    backend: Any = None
    """The collective's call of its backend."""
    line: str = ""
    module: str = ""
    """The innermost module of Python calls."""


class _Collectives:
    """The blocks of functional collectives: each result, and what the backend holds until the collective is done."""

    def __init__(self) -> None:
        self._by_result: dict[Block, Any] = {}
        self._of_backend: dict[Any, list[Block]] = defaultdict(list)

    def take(self, block: Block, within: _Within) -> None:
        """Note a block that was allocated within a collective."""
        if within.backend is not None:
            self._of_backend[within.collective].append(block)
        elif within.collective is not None:
            self._by_result[block] = within.collective

    def end(self, result: Block) -> list[Block]:
        """The collective that gave `result` has finished: forget it, and return the blocks that its backend held."""
        return self._of_backend.pop(self._by_result.pop(result, None), [])


def _in_order(
    roots: list[Any], module_names: Mapping[int, str]
) -> tuple[list[tuple[Any, Any, _Within]], dict[int, str], dict[int, str]]:
    """Allocations with their fields, and marks with None, below `roots` in order of time, each with its context; then
    the modules and the lines of operators, by autograd sequence number."""
    events: list[tuple[Any, Any, _Within]] = []
    modules: dict[int, str] = {}
    lines: dict[int, tuple[int, str]] = {}
    with_kernels = _with_kernels()
    stack = [(root, "", _Within()) for root in roots]
    while stack:
        event, module, within = stack.pop()
        _, fields = event.typed
        what = type(fields)  # comparing Python's types is faster than comparing PyTorch's enumerations
        if what is _ExtraFields_Allocation:
            events.append((event, fields, within))
        elif what is _ExtraFields_TorchOp:
            name, scope = event.name, int(fields.scope)
            if name.startswith(MARK):
                events.append((event, None, within))
            elif scope == _OPENED and name not in with_kernels:
                # Python opened it; a range with an operator's name stands around that operator's kernel
                module, within = name, within._replace(range=name, operator="", backward=None)
            elif scope == _BACKWARD:
                within = within._replace(range="", operator=name, backward=fields.sequence_number)
            else:
                if not within.operator:
                    within = within._replace(operator=name)
                if scope == _FUNCTION and (number := fields.sequence_number) >= 0:
                    if module:
                        modules.setdefault(number, module)
                    if within.line:  # the first operator with that number is forward's
                        began = event.start_time_ns, within.line
                        lines[number] = min(began, lines.get(number, began))
            if within.taker is None and name in with_kernels:
                within = within._replace(taker=event)
            elif name.startswith("_c10d_functional::"):
                within = within._replace(collective=event)
            elif within.collective is not None and name.startswith("c10d::"):
                within = within._replace(backend=event)
        elif what is _ExtraFields_PyCall or what is _ExtraFields_PyCCall:
            module = module_names.get(fields.module.self_ptr, module) if getattr(fields, "module", None) else module
            within = within._replace(line=line_of_call(fields) or within.line, module=module)
        if children := event.children:
            stack.extend([(child, module, within) for child in children])
    events.sort(key=lambda noted: (noted[0].start_time_ns, noted[0].id))
    return events, modules, {number: line for number, (_, line) in lines.items()}


def user_line(frame: FrameType | None) -> str:
    """The innermost frame outside of PyTorch, Python and this plugin, as "file.py:7"."""
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_call(call: Any) -> str:
    """The user's line at which the function of a Python call begins, or from which it is called; "" without one."""
    for frame in filter(None, (getattr(call, "callsite", None), call.caller)):
        try:
            file = frame.file_name
        except UnicodeDecodeError:  # the profiler reads the names of functions that are gone
            continue
        if not is_foreign(file):
            return f"{shown(file)}:{frame.line_number}"
    return ""


@cache
def is_foreign(file: str) -> bool:
    """Whether the file belongs to PyTorch, Python or this plugin. The profiler's paths are relative to `sys.path`."""
    if file.startswith(("<", "torch/", "shardmark/")):
        return True
    python, path = Path(os.__file__).parent, Path(file)
    if not path.is_absolute():
        return (python / path).is_file() and not path.is_file()
    return any(
        path.is_relative_to(folder) for folder in (Path(torch.__file__).parent, python, Path(__file__).parents[1])
    )


@cache
def shown(file: str) -> str:
    """The path; relative to the folder in which pytest runs, if it is below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@cache
def _with_kernels() -> frozenset[str]:
    """PyTorch's own operators that have a kernel, such as "aten::mm".

    A composite operator (matmul, linear, SDPA's math backend) only calls others. Its own allocations count as tensors,
    not as workspace, as if its caller had made them. The same holds for an operator of another library: its author
    chose these allocations.
    """
    composite = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    own = (name for name in torch._C._dispatch_get_all_op_names() if name not in composite)
    named = (name.partition(".") for name in own if name.startswith("aten::"))
    return frozenset(name for name, _, overload in named if "out" not in overload.split("_"))
