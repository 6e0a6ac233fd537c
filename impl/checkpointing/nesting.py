"""Which blocks are checkpointed together: a tuple runs under one checkpoint, and may contain others.

    full              (0,), (1,), (2,), (3,)
    every_2           0, (1,), 2, (3,)
    segments of 2     (0, 1), (2, 3)
    recursive         ((0,), (1,)), (2,), (3,)

Backward needs the inputs of these blocks before it can recompute a block: `inputs`. How many blocks it runs again:
`again`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

Nest = int | tuple["Nest", ...]
"""A block by its number, or what runs under one checkpoint."""
Series = tuple[Nest, ...]
"""All blocks, in their order."""


def every(blocks: int, n: int = 1) -> Series:
    """Each n-th block has a checkpoint of its own."""
    return tuple((block,) if (block + 1) % n == 0 else block for block in range(blocks))


def segments(blocks: int, length: int | None = None) -> Series:
    """Segments of `length` blocks, by default the square root of their number, rounded; the last may have fewer."""
    length = length or round(math.sqrt(blocks))
    return tuple(tuple(range(start, min(start + length, blocks))) for start in range(0, blocks, length))


def halves(blocks: int) -> Series:
    """The first half under a checkpoint, and each half by halves again (Chen et al., 2016, section 4.4).

    The second half needs no checkpoint of its own: its backward comes first, right after its forward.
    """
    return _halves(0, blocks)


def _halves(start: int, stop: int) -> Series:
    if stop - start == 1:
        return ((start,),)
    middle = (start + stop + 1) // 2
    first = _halves(start, middle)
    return (first[0] if len(first) == 1 else first, *_halves(middle, stop))


def numbers(nest: Nest) -> Iterator[int]:
    """The blocks in it."""
    if isinstance(nest, int):
        yield nest
    else:
        for each in nest:
            yield from numbers(each)


def tuples(series: Series) -> Iterator[Series]:
    """Each checkpoint in it, an outer one before those that it contains."""
    for nest in series:
        if isinstance(nest, tuple):
            yield nest
            yield from tuples(nest)


def inputs(series: Series, block: int) -> set[int]:
    """Blocks up to this one whose inputs are in memory when backward has recomputed it."""
    found = set()
    for nest in series:
        within = list(numbers(nest))
        if block in within and isinstance(nest, tuple):
            found |= inputs(nest, block)
        elif within[0] <= block:
            found.add(within[0])
    return found


def most_inputs(series: Series) -> int:
    """The most block inputs that are in memory at once."""
    return max(len(inputs(series, block)) for nest in series for block in numbers(nest))


def again(series: Series) -> tuple[int, int]:
    """Numbers of blocks that are recomputed except for their last product, which backward does not read; and
    recomputed in full. A recomputation stops as soon as it has saved what backward reads: a block that is the last
    under its checkpoint lacks its last product, and the last checkpoint in a checkpoint waits for its own turn."""
    but_for_last = whole = 0
    for checkpoint in tuples(series):
        *before, last = checkpoint
        but_for_last += isinstance(last, int)
        whole += sum(len(list(numbers(each))) for each in before)
    return but_for_last, whole
