"""How long the segments of `recursive` are."""

from __future__ import annotations

import math


def segment_length(blocks: int) -> int:
    """Blocks in a segment of `recursive`: the square root, rounded. The last segment may have fewer."""
    return round(math.sqrt(blocks))
