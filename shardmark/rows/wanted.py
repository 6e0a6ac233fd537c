"""Changes that `--accept` lets grow: they pass, and keep their reason."""

from __future__ import annotations

from dataclasses import replace

from shardmark.rows.change import Change, ChangesOrReason, RowComparison
from shardmark.verdict.accept import Accepted
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval
from shardmark.verdict.budget import SMALLEST_EFFECT


def with_accepted(test_id: str, row: RowComparison, accepted: Accepted) -> RowComparison:
    """The comparison of a row, in which the changes that are wanted pass."""
    return {kind: _with_accepted(changes, accepted.find(test_id, kind)) for kind, changes in row.items()}


def _with_accepted(changes: ChangesOrReason, found: tuple[float, str] | None) -> ChangesOrReason:
    return changes if isinstance(changes, str) or found is None else [accept(change, *found) for change in changes]


def accept(change: Change, factor: float, why: str) -> Change:
    """A change that is worse, or may be, passes if all of it lies within the factor; it fails if all of it lies beyond,
    and is undecided else. Without figures, as for another order of collectives, it passes."""
    if change.verdict not in (FAIL, UNDECIDED):
        return change
    ratio = change.interval or Interval(change.ratio, change.ratio, change.ratio, 1.0)
    verdict = ratio.verdict(factor)
    if verdict == PASS and change.not_excluded is not None and 1 + change.not_excluded > factor:
        verdict = UNDECIDED
    by_mean = change.interval is not None and change.interval.low <= 1 + SMALLEST_EFFECT
    if verdict == UNDECIDED and change.verdict == FAIL and by_mean:
        return replace(change, text=f"{change.text}; its mean is not within the accepted {factor:g}x")
    if verdict == PASS:
        return replace(change, verdict=PASS, text=f"{change.text}; accepted: {why}", accepted=why)
    if verdict == UNDECIDED:
        return replace(change, verdict=UNDECIDED, text=f"{change.text}; {factor:g}x is accepted: {why}")
    return replace(change, text=f"{change.text}; more than the accepted {factor:g}x")
