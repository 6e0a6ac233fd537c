"""The length of the segments of `recursive`."""

from __future__ import annotations

import math


def segment_length(blocks: int) -> int:
    """Blocks in a segment: the square root of all, rounded. The last segment may have fewer."""
    return round(math.sqrt(blocks))
