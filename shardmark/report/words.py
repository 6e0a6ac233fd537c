"""Implementations, cases and ratios as sentences name them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardmark.report.plots import tokens
from shardmark.report.ranking import Fastest, Span, Who, has_several, implementation, of_peer, who
from shardmark.rows.columns import Entry
from shardmark.text import cut, mib
from shardmark.verdict.betting import UNDECIDED

OPEN = f"which is faster is {UNDECIDED}"
NO_INTERVAL = "the ratio of their times has no interval"
FIRST_OPEN = f"which is fastest is {UNDECIDED}"

LONGEST, LONGEST_CASE = 60, 120
"""Most characters of an implementation's name and of a case's words in a sentence; the table has them whole."""


def called(entry: Entry) -> str:
    """The implementation in words, as it was registered; its name where it was registered without any."""
    return cut(entry["extra_info"].get("called") or implementation(entry), LONGEST)


def called_peer(entry: Entry) -> str:
    """The peer of an entry's race in words; its name where it was registered without any."""
    time = entry["extra_info"]["time"]
    return cut(time.get("peer_called") or time["peer"], LONGEST)


def where(entry: Entry, others: Sequence[Entry]) -> str:
    """The case in words and the ranks, as in "On 2 ranks, at 2,048 tokens".

    A case without words is described by the parts of its id that the cases of `others` lack; empty if there is no such
    part.
    """
    row = entry["extra_info"]
    case = cut(row["case"].get("words") or own_parts(entry, others), LONGEST_CASE)
    ranks = f"on {row['world_size']} ranks" if row["world_size"] > 1 else ""
    text = ", ".join(filter(None, (ranks, case)))
    return text[:1].upper() + text[1:]


def own_parts(entry: Entry, others: Sequence[Entry]) -> str:
    """As in "with s2048": the parts of the case's id that other cases lack; empty if there is only one case."""
    parts = [set(tokens(other)) for other in others]
    own = [part for part in tokens(entry) if not all(part in each for each in parts)]
    return f"with {' '.join(own)}" if own else ""


def figure(ratio: float) -> str:
    """A ratio in two digits or so: 0.73, 12, 0.037."""
    return f"{ratio:.2f}" if 0.095 <= ratio < 9.95 else f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"


def share(ratio: float, what: str) -> str:
    """As in "0.73 of the time" or "1.51 times the time"."""
    return f"{figure(ratio)} of the {what}" if ratio < 1 else f"{figure(ratio)} times the {what}"


def time_of(peer: str, ratio: Span) -> str:
    """As in "0.73 of the time of eager attention"."""
    return with_doubt(f"{share(ratio.mid, 'time')} of {peer}", ratio)


def with_doubt(text: str, ratio: Span) -> str:
    """The text, and why its ratio of two times decides nothing where it does not."""
    if ratio.is_decided:
        return text
    return f"{text}; {OPEN if ratio.high < math.inf else NO_INTERVAL}"


def either(entries: Sequence[Entry]) -> str:
    """As in "SDPA or FlexAttention", or "SDPA or one of 3 others"."""
    first, *others = map(called, entries)
    return " or ".join([first, *(others if len(others) < 2 else [f"one of {len(others)} others"])])


def first_place(first: Fastest, case: Sequence[Entry]) -> str:
    """As in "SDPA or FlexAttention is fastest", or that it is undecided. The peer counts, whether it has a row or
    not."""
    has_row = first.peer is None or of_peer(case) is not None
    if not has_row and first.time.low > 1:
        return f"{_peer_in(case, first.peer)} is fastest"
    if (first.rivals and not first.slower) or (not has_row and not first.time.is_decided):
        return FIRST_OPEN
    if first.peer is None and not has_several(case):
        return f"{called(first.entry)} is the only one that was timed"
    return f"{either([first.entry, *first.rivals])} is fastest"


def is_fastest(first: Fastest, case: Sequence[Entry]) -> str:
    """As in "SDPA is fastest with 0.39 of the time of eager attention"; the case's rows name the peer."""
    name = called(first.entry)
    if first.peer is None or first.peer == who(first.entry):
        took, is_decided = milliseconds(first.entry["stats"]["median"]), True
    else:
        peer = _peer_in(case, first.peer)
        took, is_decided = f"{share(first.time.mid, 'time')} of {peer}", first.time.is_decided
        if of_peer(case) is None and first.time.low > 1:
            return f"{peer} is faster: {name} takes {took}"
    if first.rivals:
        overlap = "" if first.slower else ", and the intervals of all overlap"
        return f"{first_place(first, case)}: {name} takes {took}{overlap}"
    if is_decided:
        return f"{name} is fastest with {took}"
    return f"{FIRST_OPEN}: {name} takes {took}" if first.slower else with_doubt(f"{name} takes {took}", first.time)


def _peer_in(case: Sequence[Entry], peer: Who | None) -> str:
    """The common peer in words, from its own row or from one that was raced against it."""
    row = of_peer(case)
    if row is not None:
        return called(row)
    raced = ((entry, entry["extra_info"]) for entry in case)
    return next(called_peer(entry) for entry, row in raced if (row["family"], row["time"].get("peer")) == peer)


def leaves_open(answer: str) -> bool:
    """Whether an answer leaves its comparison, or a part of it, undecided."""
    return UNDECIDED in answer or NO_INTERVAL in answer


def sentence(place: str, text: str) -> str:
    """The text with a place before it, a capital and a full stop."""
    text = f"{place}, {text}" if place else text
    return f"{text[:1].upper()}{text[1:]}."


def milliseconds(seconds: float) -> str:
    """Milliseconds in three digits."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def size(nbytes: int) -> str:
    """As in "1.50 MiB"; below a hundredth of a MiB in bytes."""
    return f"{mib(nbytes)} MiB" if nbytes >= 2**20 / 100 else f"{nbytes:,} bytes"
