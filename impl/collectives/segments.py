"""How our own collectives cut what they send into segments, and the buffers that those take."""

from __future__ import annotations

SEGMENT_BYTES = 2**20
"""Our own collectives pass parts on in segments of about this size, so that adding one overlaps receiving the next."""
IN_FLIGHT = 2
"""Segments on their way at once, each with buffers of its own."""


def segments_of(nbytes: int) -> int:
    """Into how many segments a part of that many bytes is cut."""
    return max(1, -(-nbytes // SEGMENT_BYTES))


def buffer_bytes(part: int, itemsize: int, rows: int) -> int:
    """Bytes of the buffers for parts of up to `part` elements: `rows` segments for each one in flight."""
    segments = segments_of(part * itemsize)
    return min(IN_FLIGHT, segments) * rows * -(-part // segments) * itemsize
