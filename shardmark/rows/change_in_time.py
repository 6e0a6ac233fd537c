"""Changes in a row's time: its ratios to the peer and to the calibration load, beside those of an earlier run on the
same machine.

Seconds depend on whatever else the machine does; a ratio of steps that took turns does not. A slowdown that the peer
shares changes the ratio to the load alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardmark.meter.disturbances import WAITED
from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import Change, ChangesOrReason
from shardmark.rows.pairs import PEER, pairs_of
from shardmark.rows.row import Row
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED
from shardmark.verdict.slowdown import EFFECTS, LARGEST, Slowdown, judged, slowdown

BUSY = "not judged, as one of the runs waited for cores that other processes had: --against-ref sees both beside them"
"""A step on several threads waits for the last of them, so beside a neighbour it is not slower by its peer's share."""


def changes_in_time(baseline: BaselineRow, row: Row, baseline_name: str, largest: float = LARGEST) -> ChangesOrReason:
    """The changes of the ratios that both rows have, or why there are none; a pass excludes what is over `largest`."""
    if baseline.link != row["link"]:
        return "on another link"
    now = pairs_of(row["time"])
    if not now:
        return "not timed beside a peer or the load"
    if PEER in now and baseline.peer != row["time"].get("peer"):
        del now[PEER]
    found: list[Change] = []
    for name, pairs in now.items():
        if name in baseline.pairs:
            beside = f"{row['time']['peer']}" if name == PEER else "the calibration load"
            text = f"the time in {baseline_name}, beside {beside}"
            stalls = row["time"].get("stalls", "")
            shown = slowdown(pairs, baseline.pairs[name])
            change = change_of(shown, name, largest, text, stalls)
            if change.verdict == FAIL and (baseline.waited or WAITED in row["time"].get("machine", {})):
                change = replace(change, verdict=UNDECIDED, text=f"{change.text}; {BUSY}")
            if found and change.verdict == UNDECIDED and not shown.shown(EFFECTS[name]):  # the peer has decided
                change = replace(change, verdict=PASS)
            found.append(change)
    return found or f"with no other step of {baseline_name} to stand beside"


def change_of(found: Slowdown, name: str, largest: float, than: str, stalls: str = "") -> Change:
    """The change of a ratio to the "ref", the "peer" or the "load"; `than` names the earlier time."""
    verdict = judged(found, name, largest)
    text = f"{found.ratio.center:.3f}x {than}, {found}"
    if stalls and found.mean > found.ratio.center:
        text += f"; {stalls}"
    if verdict == UNDECIDED and found.shown(EFFECTS[name]):
        few = found.processes < found.needed
        text += (
            f"; {found.processes} of {found.needed} fresh processes ran" if few else "; fresh processes do not agree"
        )
    if verdict == UNDECIDED:
        text += f"; slowdowns up to {share(found.not_excluded)} are not excluded"
    worse = verdict == FAIL
    return Change(
        verdict,
        text,
        better=found.faster and not worse and found.ratio.high * (1 + EFFECTS[name]) < 1,
        figure=f"step time, {than.partition(', ')[2]}" if ", " in than else "step time",
        before=1.0,
        now=found.ratio.center,
        interval=found.ratio,
        not_excluded=found.not_excluded,
    )


def share(value: float) -> str:
    """As in "4.2%"; "any size" for infinity."""
    return "any size" if math.isinf(value) else f"{100 * value:.2g}%" if value < 0.1 else f"{value:.0%}"


def not_excluded(changes: Sequence[Change]) -> float | None:
    """The largest slowdown of a row that its time's first change leaves possible: the one beside the peer, if there is
    one. None without a change in time, and where a slowdown is shown."""
    if not changes or any(change.verdict == FAIL for change in changes):
        return None
    return changes[0].not_excluded


def shared_not_excluded(changes: Sequence[Change]) -> float | None:
    """The largest slowdown that a step may share with its peer; None for a row without both changes."""
    return changes[1].not_excluded if len(changes) > 1 else None
