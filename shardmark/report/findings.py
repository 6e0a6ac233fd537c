"""Findings of a run, in full sentences."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.report.ranking import implementation, time_beside, who
from shardmark.report.summary import Summary
from shardmark.rows.columns import Entry


@dataclass(frozen=True)
class Finding:
    """A sentence on a question's rows; `bars` are (implementation, time, memory or None), relative to the peer."""

    sentence: str
    question: str
    bars: tuple[tuple[str, float, float | None], ...]
    weight: float


def findings(summary: Summary, most: int = 8) -> list[Finding]:
    """The most telling ones first: of each question, the fastest raced row."""
    found: dict[str, Finding] = {}
    for entry in summary.entries:
        time = entry["extra_info"]["time"]
        peers = [each for each in summary.entries if _raced(entry, each)]
        if entry["stats"] and time.get("interval") and time["interval"][1] < 1 and peers:
            each = _finding(entry, peers[0])
            found[each.question] = max(found.get(each.question, each), each, key=lambda one: one.weight)
    return sorted(found.values(), key=lambda one: -one.weight)[:most]


def _raced(entry: Entry, peer: Entry) -> bool:
    mine, theirs = entry["extra_info"], peer["extra_info"]
    same = (entry["group"], mine["case"]["id"]) == (peer["group"], theirs["case"]["id"])
    return same and bool(peer["stats"]) and implementation(peer) == mine["time"]["peer"]


def _finding(entry: Entry, peer: Entry) -> Finding:
    ratio = time_beside([entry, peer], entry, peer).mid
    mine, theirs = (each["extra_info"]["memory"].get("tensors") for each in (entry, peer))
    memory = mine / theirs if mine and theirs else None
    text = f"At {entry['extra_info']['case']['id']} {who(entry)[1]} takes {ratio:.2f} of {who(peer)[1]}'s time"
    text += f" and {memory:.2f} of its memory." if memory else "."
    bars = (who(peer)[1], 1.0, 1.0 if memory else None), (who(entry)[1], ratio, memory)
    return Finding(text, entry["group"], bars, 1 / ratio)


def undecided(summary: Summary) -> list[str]:
    """A sentence for each question without a decided finding."""
    decided = {each.question for each in findings(summary, most=1000)}
    return [f"{text}: undecided." for text in dict.fromkeys(e["group"] for e in summary.entries) if text not in decided]


def verdict(summary: Summary) -> str:
    """One sentence on the run."""
    return f"{len(summary.outcomes.failed)} tests failed; {summary.outcomes.counted()}."
