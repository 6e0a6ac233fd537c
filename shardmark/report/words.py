"""Implementations, cases and ratios as sentences name them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardmark.report.ranking import Fastest, Span, implementation, of_peer, who
from shardmark.rows.columns import Entry
from shardmark.text import mib

OPEN = "which is faster is undecided"
NO_INTERVAL = "the ratio of their times has no interval"


def called(entry: Entry) -> str:
    """The implementation in words, as it was registered; its name where it was registered without any."""
    words: str = entry["extra_info"].get("called") or implementation(entry)
    return words


def where(entry: Entry, others: Sequence[Entry]) -> str:
    """The case in words and the ranks, as in "On 2 ranks, at 2,048 tokens".

    A case without words is described by the parts of its id that the cases of `others` lack; empty if there is no such
    part.
    """
    row = entry["extra_info"]
    case: str = row["case"].get("words") or own_parts(entry, others)
    ranks = f"on {row['world_size']} ranks" if row["world_size"] > 1 else ""
    text = ", ".join(filter(None, (ranks, case)))
    return text[:1].upper() + text[1:]


def own_parts(entry: Entry, others: Sequence[Entry]) -> str:
    """As in "with s2048": the parts of the case's id that other cases lack; empty if there is only one case."""
    ids = {other["extra_info"]["case"]["id"] for other in others}
    parts = [set(each.split("-")) for each in ids]
    own = [part for part in entry["extra_info"]["case"]["id"].split("-") if not all(part in each for each in parts)]
    return f"with {' '.join(own)}" if own else ""


def figure(ratio: float) -> str:
    """A ratio in two digits or so: 0.73, 12, 0.037."""
    return f"{ratio:.2f}" if 0.095 <= ratio < 9.95 else f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"


def share(ratio: float, what: str) -> str:
    """As in "0.73 of the time" or "1.51 times the time"."""
    return f"{figure(ratio)} of the {what}" if ratio < 1 else f"{figure(ratio)} times the {what}"


def beside(ratio: Span, peer: str) -> str:
    """As in "0.73 of the time of eager attention"."""
    return with_doubt(f"{share(ratio.mid, 'time')} of {peer}", ratio)


def with_doubt(text: str, ratio: Span) -> str:
    """The text, and why its ratio of two times decides nothing where it does not."""
    if ratio.is_decided:
        return text
    return f"{text}; {OPEN if ratio.high < math.inf else NO_INTERVAL}"


def first_place(first: Fastest) -> str:
    """As in "SDPA or FlexAttention is fastest", or that it is undecided."""
    if first.rivals and not first.slower:
        return "which is fastest is undecided"
    others = [called(first.rivals[0])] if len(first.rivals) == 1 else [f"one of {len(first.rivals)} others"]
    return f"{' or '.join([called(first.entry), *(others if first.rivals else [])])} is fastest"


def is_fastest(first: Fastest, case: Sequence[Entry]) -> str:
    """As in "SDPA is fastest with 0.39 of the time of eager attention"; the case's rows name the peer."""
    name, peer = called(first.entry), of_peer(case)
    if first.peer is None or first.peer == who(first.entry):
        took, is_decided = milliseconds(first.entry["stats"]["median"]), True
    else:
        took = f"{share(first.time.mid, 'time')} of {first.peer[1] if peer is None else called(peer)}"
        is_decided = first.time.is_decided
    if first.rivals:
        return (
            f"{first_place(first)}: {name} takes {took}{'' if first.slower else ', and the intervals of all overlap'}"
        )
    return f"{name} is fastest with {took}" if is_decided else with_doubt(f"{name} takes {took}", first.time)


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
