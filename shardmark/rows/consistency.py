"""Contradictions among the figures of a run: two that must agree, and do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from shardmark.rows.atomic_json import Entry
from shardmark.rows.row import Row
from shardmark.verdict.betting import MISSED, PASS, REACHED
from shardmark.verdict.budget import WORTH, tolerated

ALIKE = 1e-6
"""Relative difference up to which two figures are the same: they come from the same numbers."""


def contradictions(entries: Sequence[Entry]) -> Iterator[str]:
    """One line for each pair of figures that contradict each other, with the row's test and both figures."""
    timed = [entry for entry in entries if entry["stats"]]
    rows: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in timed:
        rows[_place(entry, entry["extra_info"]["implementation"])].append(entry)
    for entry in timed:
        name, row = entry["fullname"], entry["extra_info"]
        found = [*_within(entry, row), *_by_time(entry, row), *_verdicts(row)]
        if row["time"].get("ratio") is not None:
            for peer in rows[_place(entry, row["time"]["peer"])]:
                found += _with_peer(entry, peer)
        yield from (f"{name}: {line}" for line in found)


def _place(entry: Entry, implementation: str) -> tuple[Any, ...]:
    row = entry["extra_info"]
    return entry["group"], row["family"], implementation, row["case"]["id"], row["world_size"]


def _within(entry: Entry, row: Row) -> Iterator[str]:
    """The median lies between the quartiles, the ratio in its intervals, and the parts in the step."""
    stats: dict[str, float] = entry["stats"]
    time: Mapping[str, Any] = row["time"]
    if not stats["q1"] <= stats["median"] <= stats["q3"]:
        yield f"median {stats['median']:.6g} s outside of the quartiles {stats['q1']:.6g} and {stats['q3']:.6g} s"
    for each in ("interval", "judged_interval"):
        low, high = time.get(each) or (0.0, math.inf)
        if not low <= (ratio := time.get("ratio") or low) <= high:
            yield f"ratio {ratio:.6g} outside of its {each} [{low:.6g}, {high:.6g}]"


def _by_time(entry: Entry, row: Row) -> Iterator[str]:
    """Figures that are something over the step's time: the peer's time, the fraction of the limit, MFU."""
    seconds: float = entry["stats"]["median"]
    time, limit, work = cast(tuple[dict[str, Any], ...], (row["time"], row["limit"], row["work"]))
    if time.get("ratio") is not None:
        by_ratio = time["ratio"] * time["peer_median"]
        yield from _differ("the time is {} s, the ratio times the peer's {} s", seconds, by_ratio)
    if limit.get("fraction") is not None:
        yield from _differ("the limit's fraction is {}, by its time {}", limit["fraction"], limit["seconds"] / seconds)
    if work.get("flops") and "flops_per_second" in work:
        yield from _differ("{} FLOP/s, by the time {}", work["flops_per_second"], work["flops"] / seconds)


def _verdicts(row: Row) -> Iterator[str]:
    """A goal that was reached or missed, and a budget that was met, say the same as their intervals."""
    time: Mapping[str, Any] = row["time"]
    if time.get("interval") and time.get("goal") is not None and time["outcome"] in (REACHED, MISSED):
        low, high = time["interval"]
        limit = time["goal"] * (1 + WORTH)
        if (high <= limit) != (time["outcome"] == REACHED):
            yield f"goal {time['goal']} {time['outcome']}, where the interval is [{low:.6g}, {high:.6g}]"
    if time.get("judged_interval") and time.get("budget") is not None and row["verdict"] == PASS:
        low, high = time["judged_interval"]
        if high > tolerated(time["budget"]):
            yield f"passed a budget of {time['budget']}, where the interval is [{low:.6g}, {high:.6g}]"


def _with_peer(entry: Entry, peer: Entry) -> Iterator[str]:
    """The quotient of two rows' times is their ratio, and the ratio of the reverse pair is its inverse."""
    mine, theirs = entry["extra_info"]["time"], peer["extra_info"]["time"]
    quotient = entry["stats"]["median"] / peer["stats"]["median"]
    yield from _differ(f"ratio to {mine['peer']} {{}}, quotient of the times {{}}", mine["ratio"], quotient)
    if theirs.get("peer") == entry["extra_info"]["implementation"]:
        yield from _differ("ratio {}, inverse of the peer's ratio {}", mine["ratio"], 1 / theirs["ratio"])


def _differ(text: str, one: float, other: float) -> Iterator[str]:
    if not math.isclose(one, other, rel_tol=ALIKE):
        yield text.format(f"{one:.6g}", f"{other:.6g}")
