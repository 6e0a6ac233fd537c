"""Implementations, cases and ratios as sentences name them."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.report.ranking import implementation
from shardmark.rows.columns import Entry
from shardmark.text import mib


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


def size(nbytes: int) -> str:
    """As in "1.50 MiB"; below a hundredth of a MiB in bytes."""
    return f"{mib(nbytes)} MiB" if nbytes >= 2**20 / 100 else f"{nbytes:,} bytes"
