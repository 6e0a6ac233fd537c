"""Changes in a row's time: the ratio to the peer, beside the same ratio in an earlier run on the same machine."""

from __future__ import annotations

from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import Change, ChangesOrReason
from shardmark.rows.row import Row
from shardmark.verdict.betting import Interval
from shardmark.verdict.budget import tolerated


def changes_in_time(baseline: BaselineRow, row: Row, ratio: Interval | None, baseline_name: str) -> ChangesOrReason:
    """The change of the ratio to the peer, or why it is not compared."""
    before = baseline.ratio
    if ratio is None or before is None:
        return "without a peer"
    if baseline.peer != row["time"]["peer"]:
        return "with another peer"
    if baseline.link != row["link"]:
        return "on another link"
    if before.ends is None:
        return f"of too few rounds in {baseline_name}"
    text = (
        f"{ratio.center:.3f}x {baseline.peer}'s time, {ratio}, against {before.center:.3f}x in {baseline_name}, "
        f"[{before.low:.4g}, {before.high:.4g}]"
    )
    return [Change(ratio.verdict(tolerated(before.high)), text, better=tolerated(ratio.high) < before.low)]
