"""CUDA's caching allocator and the progress of streams, as models: bytes in blocks and bytes of the device."""

import pytest

from shardmark.meter.allocations import EMPTY_CACHE, Allocated, Block, Event, Marked, Released
from shardmark.predict.simulation.caching_allocator import MIB, CachingAllocator, held_at_marks
from shardmark.predict.simulation.streams import (
    ALL_AWAITED,
    ALL_AWAITED_AS_KERNELS_LOAD,
    AWAITED,
    FOLLOWED,
    RECORDED,
    USED,
)


def test_sizes_are_rounded_and_segments_taken_for_them() -> None:
    for nbytes, block, segment in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left over is no more than 1 MiB: the block keeps it
    ):
        allocator = CachingAllocator()
        assert allocator.allocate(nbytes) is not None
        assert (allocator.allocated, allocator.reserved) == (block, segment)
    assert CachingAllocator().allocate(0) is None


def test_the_smallest_free_block_is_given_out_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocated == 0 and allocator.reserved == 52 * MIB
    first = allocator.allocate(12 * MIB)  # the smaller one
    second, third = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)  # the larger one in two
    assert allocator.reserved == 52 * MIB
    for block in (second, third, first):
        allocator.free(block)
    assert allocator.allocate(40 * MIB) is not None and allocator.reserved == 52 * MIB


def test_a_stream_has_pools_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB))
    assert allocator.allocate(16 * MIB, stream="2") is not None and allocator.reserved == 32 * MIB


def test_the_peak_is_that_since_it_was_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB))
    allocator.reset_peaks()
    allocator.allocate(MIB)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (MIB, 18 * MIB)


def test_where_the_device_has_no_more_free_segments_go_back() -> None:
    allocator = CachingAllocator(limit=40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    kept = allocator.allocate(32 * MIB)
    assert allocator.reserved == 32 * MIB  # without a limit it is 62
    allocator.allocate(20 * MIB)  # more than there is, as what is live cannot go
    assert allocator.reserved == 52 * MIB
    allocator.free(kept)
    allocator.reset_peaks()
    assert allocator.reserved == allocator.peak_reserved == 20 * MIB


def test_free_segments_go_back_to_the_device_where_the_cache_is_emptied() -> None:
    kept, freed = Block(11 * MIB, 0), Block(40 * MIB, 1)
    before = [Allocated(kept), Allocated(freed), Released(freed), Marked("before")]
    held = held_at_marks([*before, Marked(EMPTY_CACHE), Marked("after")])
    assert held["before"].reserved == 52 * MIB and held["after"].reserved == 12 * MIB


def _reserved(*after_free: str, slowest: bool = False) -> int:
    """MiB, where a block of 30 that stream "1" uses is freed, these marks follow, and another such one is allocated."""
    first, second = Block(30 * MIB, 1), Block(30 * MIB, 2)
    used: list[Event] = [Allocated(first), Marked(f"{FOLLOWED}1/"), Marked(f"{USED}1 1"), Released(first)]
    events = [*used, *map(Marked, after_free), Allocated(second), Marked("end")]
    return held_at_marks(events, slowest=slowest)["end"].reserved // MIB


@pytest.mark.parametrize("slowest", [False, True])
def test_a_block_that_another_stream_uses_is_free_once_the_host_has_waited_for_it(slowest: bool) -> None:
    there = Block(30 * MIB, 2)
    own = [Allocated(there), Marked(f"{USED}2 "), Released(there), Allocated(Block(MIB, 3)), Marked("end")]
    assert held_at_marks(own, slowest=slowest)["end"].reserved == 32 * MIB  # its own stream needs no wait
    assert _reserved(slowest=slowest) == 60
    assert _reserved(f"{RECORDED}7 1", slowest=slowest) == 60
    for waits in ([f"{RECORDED}7 1", f"{AWAITED}7"], [f"{FOLLOWED}/1", f"{RECORDED}7 ", f"{AWAITED}7"], [ALL_AWAITED]):
        assert _reserved(*waits, slowest=slowest) == 30


def test_a_freed_block_is_active_until_the_host_has_waited_for_its_streams() -> None:
    first, second, third = (Block(30 * MIB, number) for number in (1, 2, 3))
    used = [Allocated(first), Marked(f"{FOLLOWED}1/"), Marked(f"{USED}1 1"), Released(first), Allocated(second)]
    held = held_at_marks([*used, Marked(ALL_AWAITED), Allocated(third), Marked("end")])["end"]
    assert (held.peak_allocated, held.peak_active, held.peak_reserved) == (60 * MIB, 60 * MIB, 60 * MIB)
    held = held_at_marks([*used, Marked("end")])["end"]
    assert (held.peak_allocated, held.peak_active) == (30 * MIB, 60 * MIB)


def test_only_the_slowest_stream_is_behind_what_it_has_waited_for() -> None:
    """The host has seen the first stream to be past all that the other one waited for."""
    waits = [f"{RECORDED}7 ", f"{AWAITED}7"]
    assert _reserved(*waits) == 30 and _reserved(*waits, slowest=True) == 60
    assert _reserved(ALL_AWAITED_AS_KERNELS_LOAD) == 30
    assert _reserved(ALL_AWAITED_AS_KERNELS_LOAD, slowest=True) == 60


def test_blocks_that_streams_use_are_waited_for_where_the_device_is_full() -> None:
    first, second = Block(30 * MIB, 1), Block(40 * MIB, 2)
    events = [Allocated(first), Marked(f"{USED}1 1"), Released(first), Allocated(second), Marked("end")]
    assert held_at_marks(events, slowest=True)["end"].reserved == 70 * MIB
    assert held_at_marks(events, slowest=True, limit=50 * MIB)["end"].reserved == 40 * MIB
