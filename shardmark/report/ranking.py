"""Which implementation is fastest: each one's time as a ratio to one common peer's, with its interval.

fastest = fastest_of(largest_case(entries))
fastest.time, fastest.rivals
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.rows.columns import Entry

Who = tuple[str, str]
"""(family, implementation): two families may use the same name."""

ERRORS = 3.0
"""Half-width of a median's span in standard errors: machines drift."""

MEDIAN_ERROR = 0.93
"""Standard error of a median, in quartile ranges over the root of the rounds: 1.253 deviations of 0.741 ranges each,
for normal noise."""


@dataclass(frozen=True)
class Span:
    """A figure with its lower and upper end; 0 and infinity where nothing is known."""

    low: float
    mid: float
    high: float

    def __mul__(self, other: Span) -> Span:
        return Span(self.low * other.low, self.mid * other.mid, self.high * other.high)

    @property
    def is_decided(self) -> bool:
        """Whether the span of a ratio excludes 1, so that it is known which of the two is smaller."""
        return self.high < 1 or self.low > 1

    @property
    def inverse(self) -> Span:
        """The span of 1 / figure."""
        return Span(1 / self.high, 1 / self.mid, 1 / self.low if self.low else math.inf)


ONE = Span(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Fastest:
    """The fastest implementation, and its rivals: those whose intervals overlap its own."""

    entry: Entry
    time: Span
    """Ratio to the peer; without a peer, seconds."""
    peer: Who | None
    rivals: tuple[Entry, ...]
    slower: int
    """How many are slower for certain."""


def fastest_of(case: Sequence[Entry]) -> Fastest:
    """The fastest among the entries of one case."""
    peer = peer_of(case)
    first = _first(case)
    spans = relative_times(case, peer)
    best = min(spans, key=lambda each: (spans[each].high == math.inf, spans[each].mid))
    rivals = [each for each in spans if each != best and spans[each].low <= spans[best].high]
    slower = len(spans) - 1 - len(rivals)
    if not slower:
        best = min(spans, key=lambda each: spans[each].mid)
        rivals = [each for each in spans if each != best]
    return Fastest(first[best], spans[best], peer, tuple(first[each] for each in rivals), slower)


def implementation(entry: Entry) -> str:
    """The name of an entry's implementation."""
    name: str = entry["extra_info"]["implementation"]
    return name


def who(entry: Entry) -> Who:
    """An entry's family and implementation."""
    return entry["extra_info"]["family"], implementation(entry)


def same_case(entry: Entry) -> str:
    """Equal for entries of one case and world size.

    A case may name the implementation that runs it, and then so does its id; neither counts.
    """
    row = entry["extra_info"]
    case = {name: value for name, value in row["case"].items() if value != row["implementation"]}
    if len(case) < len(row["case"]):
        case.pop("id", None)
    return json.dumps([case, row["world_size"]], sort_keys=True)


def largest_case(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the case and world size with most work; those with several implementations come first."""
    cases: dict[str, list[Entry]] = {}
    for entry in entries:
        cases.setdefault(same_case(entry), []).append(entry)
    several = [case for case in cases.values() if has_several(case)]
    return max(several or list(cases.values()), key=lambda case: (_work(case[0]), len(case)))


def _work(entry: Entry) -> tuple[float, float, int]:
    work = entry["extra_info"]["work"]
    return work.get("flops", 0), work.get("bytes_moved", 0), entry["extra_info"]["world_size"]


def tensors(entry: Entry) -> int | None:
    """Bytes of tensors at the peak; None where memory was not metered."""
    found: int | None = entry["extra_info"]["memory"].get("tensors")
    return found


def has_several(case: Sequence[Entry]) -> bool:
    """Whether a case has more than one implementation."""
    return len(set(map(who, case))) > 1


def peer_of(case: Sequence[Entry]) -> Who | None:
    """The peer that most rows are raced against; None without races."""
    peers = Counter(theirs for _, theirs, _ in _races(case))
    return peers.most_common(1)[0][0] if peers else None


def of_peer(case: Sequence[Entry]) -> Entry | None:
    """The entry of the common peer; None if it is not among these."""
    peer = peer_of(case)
    return None if peer is None else _first(case).get(peer)


def time_beside(case: Sequence[Entry], mine: Entry, theirs: Entry) -> Span:
    """Time of `mine` over time of `theirs`."""
    return relative_times(case, who(theirs))[who(mine)]


def median_seconds(entry: Entry) -> Span:
    """A step's median time in seconds, within its standard errors."""
    stats = entry["stats"]
    spread = MEDIAN_ERROR * (stats["q3"] - stats["q1"])
    error = ERRORS * spread / math.sqrt(stats["rounds"]) if stats["rounds"] > 1 else math.inf
    return Span(max(stats["median"] - error, 0.0), stats["median"], stats["median"] + error)


def relative_times(case: Sequence[Entry], peer: Who | None) -> dict[Who, Span]:
    """Each implementation's time as a ratio to the peer's; without a peer, in seconds.

    Ratios measured in pairs are multiplied along the chain of races to the peer (A to B, B to the peer), and so are the
    ends of their intervals. Without such a chain it is the quotient of the times, which decides nothing.
    """
    first = _first(case)
    if peer is None:
        return {each: median_seconds(entry) for each, entry in first.items()}
    found, reached = {peer: ONE}, [peer]
    races = _races(case)
    for here in reached:  # which grows
        for mine, theirs, ratio in races:
            there, step = (mine, ratio) if theirs == here else (theirs, ratio.inverse)
            if here in (mine, theirs) and there not in found:
                found[there] = found[here] * step
                reached.append(there)
    if peer in first:
        unit = first[peer]["stats"]["median"]
        for each, entry in first.items():
            found.setdefault(each, Span(0.0, entry["stats"]["median"] / unit, math.inf))
    return {each: found[each] for each in first if each in found}


def _races(case: Sequence[Entry]) -> list[tuple[Who, Who, Span]]:
    """Each race: implementation, peer, and the ratio of their times."""
    races = []
    for entry in case:
        row = entry["extra_info"]
        if row["time"].get("ratio"):
            peer = row["family"], row["time"]["peer"]
            races.append((who(entry), peer, ratio_to_peer(entry)))
    return races


def ratio_to_peer(entry: Entry) -> Span:
    """The time ratio of an entry that was raced, within its interval; too few rounds give none, and decide nothing."""
    time = entry["extra_info"]["time"]
    low, high = time["interval"] or (0.0, math.inf)
    return Span(low, time["ratio"], high)


def _first(case: Sequence[Entry]) -> dict[Who, Entry]:
    """Each implementation's entry; of several, the one that was measured first."""
    found: dict[Who, Entry] = {}
    for entry in case:
        found.setdefault(who(entry), entry)
    return found
