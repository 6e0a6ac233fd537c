"""How the ring and the direct exchange cut tensors into segments, and the bytes of their buffers."""

from __future__ import annotations

SEGMENT_BYTES = 2**20
"""About the size of a segment: small enough that adding one overlaps receiving the next."""
IN_FLIGHT = 2
"""Segments that are sent and received at the same time, each with its own buffers."""


def segments_of(nbytes: int) -> int:
    """Number of segments that a part of that many bytes is cut into."""
    return max(1, -(-nbytes // SEGMENT_BYTES))


def buffer_bytes(part: int, itemsize: int, rows: int) -> int:
    """Bytes of the buffers for parts of up to `part` elements: `rows` segments for each one in flight."""
    segments = segments_of(part * itemsize)
    return min(IN_FLIGHT, segments) * rows * -(-part // segments) * itemsize
