"""When the host sees that a stream is done with a block of another one.

A block that another stream reads too is marked by `Tensor.record_stream`. Once the block is freed, the caching
allocator gives it out again only when it sees that the other stream is past its use (insert_events and process_events
in PyTorch's c10/cuda/CUDACachingAllocator.cpp). The host is far ahead of the GPU, and so it sees that only where it
waits: for an event, as the rate limiter of PyTorch's FSDP1 does, or for all that it has enqueued.

Two readings of a recording's streams, events and waits:

- expected: only the first stream, which computes, takes time. Messages and copies end as soon as what they wait for.
- slowest: a stream has passed only those points that a wait of the host proves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shardmark.meter.allocations import ALLOCATOR

USED = ALLOCATOR + "used "
"""Prefix of the mark that another stream uses a block; the block's address and the stream follow."""
RECORDED = ALLOCATOR + "event "
"""Prefix of the mark that an event is recorded; its number and the stream follow."""
FOLLOWED = ALLOCATOR + "follows "
"""Prefix of the mark that a stream waits for another one's work so far; both names follow, separated by a slash."""
AWAITED = ALLOCATOR + "host waits for event "
"""Prefix of the mark that the host waits for an event; its number follows."""
ALL_AWAITED = ALLOCATOR + "host waits"
"""The mark that the host waits for all that it has enqueued."""
ALL_AWAITED_AS_KERNELS_LOAD = ALLOCATOR + "host waits as kernels are loaded"
"""The mark that the host may wait for all that it has enqueued, as some drivers do when they load kernels."""

FIRST = ""
"""The stream that computes."""

Progress = dict[str, int]
"""The position that each stream has reached, by name; a missing stream has done nothing."""


class Host:
    """The host's knowledge of the streams' progress, as a recording is replayed: expected, or the slowest possible."""

    def __init__(self, slowest: bool = False) -> None:
        self._slowest = slowest
        self._position = 0
        """Steps of the recording so far; by the expected reading, only allocations on the first stream count."""
        self._waited_for: dict[str, Progress] = defaultdict(dict)
        self._at_events: dict[str, Progress] = {}
        self._seen: Progress = {}
        self._all_seen = 0

    def step(self, computes: bool) -> None:
        """An allocation, a release or a mark; `computes` for an allocation on the first stream."""
        self._position += self._slowest or computes

    def needed(self, streams: Iterable[str]) -> Progress:
        """The progress at which these streams have finished all their present work."""
        needed: Progress = {}
        for stream in streams:
            _advance(needed, self._given(stream))
        return needed

    def has_seen(self, progress: Progress) -> bool:
        return all(max(self._seen.get(stream, 0), self._all_seen) >= position for stream, position in progress.items())

    def follow(self, mark: str) -> None:
        """Process a mark; marks about other things change nothing."""
        if mark.startswith(RECORDED):
            event, _, stream = mark.removeprefix(RECORDED).partition(" ")
            self._at_events[event] = self._given(stream)
        elif mark.startswith(FOLLOWED):
            stream, _, other = mark.removeprefix(FOLLOWED).partition("/")
            _advance(self._waited_for[stream], self._given(other))
        elif mark.startswith(AWAITED):
            _advance(self._seen, self._at_events[mark.removeprefix(AWAITED)])
        elif mark == ALL_AWAITED or (mark == ALL_AWAITED_AS_KERNELS_LOAD and not self._slowest):
            self._all_seen = self._position

    def _given(self, stream: str) -> Progress:
        given = dict(self._waited_for[stream])
        if self._slowest or stream == FIRST:
            given[stream] = self._position
        return given


def _advance(progress: Progress, further: Progress) -> None:
    """Advance each stream of `progress` to its position in `further`, where that one is larger."""
    for stream, position in further.items():
        progress[stream] = max(progress.get(stream, 0), position)
