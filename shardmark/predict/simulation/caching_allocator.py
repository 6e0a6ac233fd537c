"""A model of CUDA's caching allocator: its blocks, their sizes, and the bytes that it reserves on the device.

    allocator = CachingAllocator()
    block = allocator.allocate(1000)
    allocator.allocated, allocator.reserved  # 1024, 2 MiB
    allocator.free(block)

It rounds sizes up to 512 bytes. It takes a segment of 2 MiB for a block of at most 1 MiB, of 20 MiB for a block below
10 MiB, and of a multiple of 2 MiB for a larger one. It gives out the smallest free block that is large enough, splits
off what is left over, and merges free neighbours. (PyTorch's documentation, "CUDA semantics: memory management"; the
figures are those of its header c10/core/AllocatorConfig.h.) Each stream has pools of its own. Segments without a block
in use go back to the device in `empty_cache`, and where more than `limit` bytes would be reserved. A freed block that
other streams use is reused only when the host sees that they are done with it (`shardmark.predict.simulation.streams`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardmark.meter.allocations import ALLOCATOR, EMPTY_CACHE, STREAM, Allocated, Block, Event, Marked, Released
from shardmark.predict.simulation.streams import FIRST, USED, Host, Progress

MIB = 2**20
ROUND = 512
"""Sizes of blocks are multiples of this."""
SMALL = MIB
"""The largest block of the small pool; a large block is split only if more than this is left over."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LARGE = 10 * MIB
"""A block of this size and more has a segment of its own size, in multiples of 2 MiB."""


@dataclass(eq=False)
class _Piece:
    """A part of a segment, free or in use, and its neighbours."""

    nbytes: int
    pool: _Pool
    address: int
    """Among free pieces of one size, the lowest address is used first."""
    before: _Piece | None = None
    after: _Piece | None = None
    free: bool = True

    def __lt__(self, other: _Piece) -> bool:
        return (self.nbytes, self.address) < (other.nbytes, other.address)


@dataclass
class _Pool:
    """Free pieces by size."""

    small: bool
    pieces: list[_Piece] = field(default_factory=list)

    def remove(self, piece: _Piece) -> None:
        del self.pieces[bisect_left(self.pieces, piece)]


class CachingAllocator:
    """Allocated bytes (in blocks), active bytes (with freed blocks that other streams use) and reserved bytes (from the
    device), now and at their peaks since `reset_peaks`."""

    def __init__(self, limit: float = math.inf) -> None:
        self.allocated = self.active = self.reserved = 0
        self.peak_allocated = self.peak_active = self.peak_reserved = 0
        self._limit = limit
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._in_use: list[tuple[_Piece, Progress]] = []
        """Freed blocks that other streams use, each with the progress at which it may be reused."""
        self._address = 0

    def allocate(self, nbytes: int, stream: str = "") -> _Piece | None:
        """A block of at least `nbytes` on that stream; None for zero bytes."""
        if nbytes == 0:
            return None
        size = -(-nbytes // ROUND) * ROUND
        pool = self._pools.setdefault((stream, size <= SMALL), _Pool(size <= SMALL))
        at = bisect_left(pool.pieces, size, key=lambda piece: piece.nbytes)
        piece = pool.pieces.pop(at) if at < len(pool.pieces) else self._reserve(pool, size)
        left = piece.nbytes - size
        if left >= ROUND if pool.small else left > SMALL:
            rest = _Piece(left, pool, piece.address + size, before=piece, after=piece.after)
            piece.nbytes, piece.after = size, rest
            if rest.after is not None:
                rest.after.before = rest
            insort(pool.pieces, rest)
        piece.free = False
        self.allocated += piece.nbytes
        self.active += piece.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        return piece

    def free(self, piece: _Piece | None, needed: Progress | None = None) -> None:
        """Take a block back. A block that other streams use is reused only once they have made the progress
        `needed`."""
        if piece is None:
            return
        self.allocated -= piece.nbytes
        if needed:
            self._in_use.append((piece, needed))
        else:
            self._pool(piece)

    def see(self, has_seen: Callable[[Progress], bool] = lambda needed: True) -> None:
        """Make freed blocks reusable whose needed progress `has_seen`; by default, all of them."""
        in_use, self._in_use = self._in_use, []
        for piece, needed in in_use:
            if has_seen(needed):
                self._pool(piece)
            else:
                self._in_use.append((piece, needed))

    def _pool(self, piece: _Piece) -> None:
        self.active -= piece.nbytes
        pool = piece.pool
        for near in (piece.before, piece.after):
            if near is not None and near.free:
                pool.remove(near)
                piece = _merged(near, piece) if near is piece.before else _merged(piece, near)
        piece.free = True
        insort(pool.pieces, piece)

    def empty_cache(self) -> None:
        """Wait for all streams and return free segments to the device, as `torch.cuda.empty_cache` does."""
        self.see()
        for pool in self._pools.values():
            for piece in [piece for piece in pool.pieces if piece.before is piece.after is None]:
                pool.remove(piece)
                self.reserved -= piece.nbytes

    def reset_peaks(self) -> None:
        """Reset the peaks, after returning free segments if more than the limit is reserved."""
        if self.reserved > self._limit:
            self.empty_cache()
        self.peak_allocated, self.peak_active, self.peak_reserved = self.allocated, self.active, self.reserved

    def _reserve(self, pool: _Pool, size: int) -> _Piece:
        """Take a segment from the device."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        nbytes = page if size < LARGE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.reserved + nbytes > self._limit:
            self.empty_cache()
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._address += nbytes
        return _Piece(nbytes, pool, self._address - nbytes)


def _merged(first: _Piece, second: _Piece) -> _Piece:
    first.nbytes, first.after = first.nbytes + second.nbytes, second.after
    if second.after is not None:
        second.after.before = first
    return first


@dataclass(frozen=True)
class AtMark:
    """Bytes at one moment: allocated and reserved, and the peaks since the last reset."""

    allocated: int
    peak_allocated: int
    peak_active: int
    reserved: int
    peak_reserved: int


def held_at_marks(
    events: Iterable[Event],
    resets: tuple[str, ...] = (),
    *,
    limit: float = math.inf,
    slowest: bool = False,
) -> dict[str, AtMark]:
    """The allocator's bytes at each mark of a recording, by the expected progress of streams or by the `slowest`.
    Peaks are reset after the marks in `resets`."""
    allocator, host = CachingAllocator(limit), Host(slowest)
    pieces: dict[Block, tuple[_Piece | None, str]] = {}
    by_address: dict[int, Block] = {}
    used_by: dict[Block, set[str]] = defaultdict(set)
    held: dict[str, AtMark] = {}
    stream = FIRST
    for event in events:
        host.step(computes=isinstance(event, Allocated) and stream == FIRST)
        match event:
            case Allocated(block):
                allocator.see(host.has_seen)
                by_address[block.address] = block
                pieces[block] = allocator.allocate(block.nbytes, stream), stream
            case Released(block):
                piece, own = pieces.pop(block)
                allocator.free(piece, host.needed(used_by.pop(block, set()) - {own}))
            case Marked(name) if name.startswith(STREAM):
                stream = name.removeprefix(STREAM)
            case Marked(name) if name == EMPTY_CACHE:
                allocator.empty_cache()
            case Marked(name) if name.startswith(USED):
                address, _, user = name.removeprefix(USED).partition(" ")
                used_by[by_address[int(address)]].add(user)
            case Marked(name) if name.startswith(ALLOCATOR):
                host.follow(name)
            case Marked(name):
                held[name] = AtMark(
                    allocator.allocated,
                    allocator.peak_allocated,
                    allocator.peak_active,
                    allocator.reserved,
                    allocator.peak_reserved,
                )
                if name in resets:
                    allocator.reset_peaks()
    return held
