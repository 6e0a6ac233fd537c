"""Below a failed test: the parts of its row that are larger than before, with the user's lines that call them now.

4,096 bytes of tensors at the peak ...
3 more: aten::mul, now 4 in mine.py:12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from shardmark.meter.callers import Callers
from shardmark.meter.over_budget import Held, found_lines
from shardmark.rows.change import Change

LINES = 3
"""Most lines of the user's that are named for one operator."""


def lines_of(
    changes: Sequence[Change], at_peak: Callable[[], list[Held]], callers: Callable[[], Callers]
) -> Iterator[str]:
    """Say what grew in each of the changes for the worse. `at_peak` and `callers` measure the row once more, and are
    called only where bytes, or operators, grew; if that fails, the rest is shown without it."""
    if any(change.figure.startswith("bytes of tensors") for change in changes):
        with suppress(Exception):
            yield from found_lines(at_peak())
            yield ""
    places: Callers = {}
    if any(change.grown and change.figure == "operators" for change in changes):
        with suppress(Exception):
            places = callers()
    for change in changes:
        for line in change.grown:
            at = list(places.get(line.partition(": ")[2], {}).items()) if change.figure == "operators" else []
            named = ", ".join(f"{count} in {place}" for place, count in at[:LINES])
            rest = f" and {sum(count for _, count in at[LINES:])} elsewhere" if at[LINES:] else ""
            yield f"{line}, now {named}{rest}" if named else line
