"""Collectives in closed form: bytes each rank must send, and the bandwidths people quote."""

from __future__ import annotations

from shardmark.cases import AllReduceCase


def all_reduce_bytes_sent(nbytes: int, ranks: int) -> int:
    """Bytes each rank must send for an all-reduce of `nbytes`: 2(n-1)/n of them (Patarasuk and Yuan, 2009)."""
    return 2 * (ranks - 1) * nbytes // ranks


def reduce_scatter_buffers(nbytes: int, ranks: int) -> int:
    """Bytes that a reduce-scatter of `nbytes` holds until it is waited for: Gloo's all-reduces a copy."""
    return nbytes


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Bytes a second across each link during an all-reduce, as NCCL's tests define it."""
    return nbytes / seconds * 2 * (ranks - 1) / ranks


def buffered_peak(case: AllReduceCase) -> int:
    """Peak of an all-reduce with a buffer as large as the tensor, in bytes."""
    return 2 * case.bytes


def in_place_peak(case: AllReduceCase) -> int:
    """Peak of an all-reduce in place, in bytes: the tensor."""
    return case.bytes
