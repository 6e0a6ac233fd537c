"""Whether a predicted step's all-gathers end before the computation wants them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from shardmark.predict.simulation.schedule import FIRST_STREAM, Step
from shardmark.rows.row import Gather

NEAR = 1e-9
"""Seconds that sums of seconds may be off."""


def gathers(step: Step) -> list[Gather]:
    """Each all-gather, in the order in which they run.

    One that ends as the first stream's next operator begins is what that operator waited for: it is exposed from the
    end of the operator before.
    """
    computing = [span for span in step.spans if span.stream == FIRST_STREAM and span.cost is not None]
    begins = [span.begin for span in computing]
    ends_of_parts = list(accumulate(step.parts.values()))
    found: list[Gather] = []
    for span in sorted((each for each in step.spans if each.name == "all_gather"), key=lambda each: each.begin):
        following = bisect_left(begins, span.end - NEAR)
        exposed = 0.0
        if 0 < following < len(begins) and begins[following] <= span.end + NEAR:
            gap = begins[following] - computing[following - 1].end
            exposed = gap if gap > NEAR else 0.0
        part = bisect_left(ends_of_parts, span.end - NEAR)
        found.append(
            {
                "part": [*step.parts, "rest"][part],
                "nbytes": span.nbytes,
                "ahead": max(span.end - exposed - span.begin, 0.0),
                "exposed": exposed,
                "in_time": float(not exposed),
            }
        )
    return found
