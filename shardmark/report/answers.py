"""The one-line answer to a question, read from its rows.

    @pytest.mark.question("What does a nap cost?", short="naps", answer=fastest)

An answer is a function from entries to one line, or to None where the entries do not hold the answer. It gets the
entries that count: with times (in a simulation, with bytes), of tests that did not fail. Among several cases it takes
the one with most work. Where an interval leaves a comparison open, the line says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shardmark.report.ranking import (
    beside,
    fastest_of,
    has_several,
    implementation,
    milliseconds,
    of_peer,
    peer_of,
    ratio_to_peer,
    time_beside,
    times,
)
from shardmark.rows.columns import Entry, goal_outcomes
from shardmark.text import mib
from shardmark.verdict.betting import FAIL, UNDECIDED

Answer = Callable[[Sequence[Entry]], str | None]

NO_ANSWER, NOT_MEASURED = "no answer", "not measured"

NONE_SMALLER = "none smaller"
NEAR = 0.99
"""A peak above this share of the peer's counts as no saving."""

LEGEND = (
    f"Fastest time, as a ratio to the peer's; smallest peak. ({UNDECIDED}): the interval includes 1 "
    f"or overlaps another; {NONE_SMALLER}: no peak is {1 - NEAR:.0%} below the peer's."
)
"""Explains the words of the answers; shown wherever answers are."""


def answered(entries: Sequence[Entry], how: Answer, failed: Collection[str] = ()) -> str:
    """The answer in one line, followed by how many entries do not count and why.

    `failed` holds the full names of tests that failed. An exception in `how` becomes the line.
    """
    if entries and all(entry["extra_info"].get("simulated") for entry in entries):
        how = predicted
    left_out = {id(entry): why for entry in entries if (why := _left_out(entry, failed))}
    counted = [entry for entry in entries if id(entry) not in left_out]
    missing = ", ".join(f"{count} {why}" for why, count in Counter(left_out.values()).items())
    try:
        text = how(counted) if counted else None
    except Exception as error:
        text = f"{NO_ANSWER}: {type(error).__name__}: {error}"
    if text is not None:
        return f"{text} ({missing})" if missing else text
    return f"{NO_ANSWER}: {missing or 'its rows do not say'}"


def counted(entries: Sequence[Entry], failed: Collection[str]) -> list[Entry]:
    """The entries that count: with times (in a simulation, with bytes), of tests that did not fail."""
    return [entry for entry in entries if _left_out(entry, failed) is None]


def _left_out(entry: Entry, failed: Collection[str]) -> str | None:
    """Why an entry does not count; None if it does."""
    verdict = entry["extra_info"]["verdict"]
    if entry["fullname"] in failed or verdict == FAIL:
        return "failed"
    if entry["extra_info"].get("simulated"):
        return None
    return (verdict or "without times") if entry["stats"] is None else None


def fastest_and_smallest(entries: Sequence[Entry]) -> str | None:
    """The fastest implementation and the smallest peak: the answer of a question that declares none."""
    case = largest_case(entries)
    if not has_several(case):
        return at(entries, case) + _alone(case[0])
    first = fastest_of(case)
    return at(entries, case) + "; ".join(filter(None, [str(first), _smallest(case, after=first.entry)]))


def fastest(entries: Sequence[Entry]) -> str | None:
    """The fastest implementation, as a ratio to the common peer."""
    case = largest_case(entries)
    return at(entries, case) + str(fastest_of(case))


def saves(other: str | None = None) -> Answer:
    """The smallest peak and its time, as ratios to those of `other`, by default the common peer."""

    def answer(entries: Sequence[Entry]) -> str | None:
        case = _metered(largest_case(entries))
        if not case:
            return None
        least = min(case, key=_tensors)
        peer = peer_of(case)
        name = other or (peer and peer[1])
        others = [entry for entry in case if implementation(entry) == name]
        mine = f"{at(entries, case)}{implementation(least)}"
        if not others or others[0] is least:
            return f"{mine} smallest, {size(_tensors(least))}"
        memory = times(_tensors(least) / _tensors(others[0]))
        time = time_beside(case, least, others[0])
        return f"{mine} {memory} {name}'s memory, {beside(time, 'its time')}"

    return answer


def predicted(entries: Sequence[Entry]) -> str | None:
    """A simulation's answer: the fastest and the smallest peak; without times, the smallest peak beside the largest."""
    case = _metered(largest_case(entries))
    if not case:
        return None
    least, most = min(case, key=_tensors), max(case, key=_tensors)
    if all(entry["stats"] for entry in case) and has_several(case):
        first = min(case, key=lambda entry: entry["stats"]["median"])
        time = f"{implementation(first)} fastest, {milliseconds(first['stats']['mean'])}"
        memory = f"{implementation(least)} smallest, {size(_tensors(least))}"
        return f"{at(entries, case)}{time}; {memory}, predicted"
    figure = f"{at(entries, case)}{implementation(least)} {size(_tensors(least))}"
    if _tensors(least) == _tensors(most):
        return f"{figure}, predicted"
    return f"{figure}, {times(_tensors(least) / _tensors(most))} {implementation(most)}'s, predicted"


def most(value: Callable[[Entry], float | None], words: str) -> Answer:
    """The largest `value`, in words such as "{name} reaches {value:.0%} of the roofline"."""

    def answer(entries: Sequence[Entry]) -> str | None:
        found = [(figure, entry) for entry in entries if (figure := value(entry)) is not None]
        if not found:
            return None
        figure, entry = max(found, key=lambda each: each[0])
        text = words.format(name=implementation(entry), value=figure)
        return at(entries, [entry]) + text

    return answer


def goals(entries: Sequence[Entry]) -> str | None:
    """How many goals were reached, missed and left undecided."""
    counts = Counter(outcome for entry in entries for _, outcome in goal_outcomes(entry["extra_info"]))
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or None


def largest_case(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the case and world size with most work; those with several implementations come first."""
    cases: dict[Any, list[Entry]] = {}
    for entry in entries:
        row = entry["extra_info"]
        cases.setdefault((row["case"]["id"], row["world_size"]), []).append(entry)
    several = [case for case in cases.values() if has_several(case)]
    return max(several or list(cases.values()), key=lambda case: (_work(case[0]), len(case)))


def at(entries: Sequence[Entry], case: Sequence[Entry]) -> str:
    """A prefix such as "s4096: ": the parts of the case's id that other cases lack; empty if there is only one case."""
    ids = {entry["extra_info"]["case"]["id"] for entry in entries}
    parts = [set(each.split("-")) for each in ids]
    own = [part for part in case[0]["extra_info"]["case"]["id"].split("-") if not all(part in each for each in parts)]
    return f"{' '.join(own)}: " if own else ""


def _work(entry: Entry) -> tuple[float, float, int]:
    work = entry["extra_info"]["work"]
    return work.get("flops", 0), work.get("bytes_moved", 0), entry["extra_info"]["world_size"]


def _smallest(case: Sequence[Entry], after: Entry) -> str | None:
    """The smallest peak in words; without the name if it belongs to `after`, the fastest, which was just named."""
    metered = _metered(case)
    if not metered:
        return None
    least = min(map(_tensors, metered))
    names = [implementation(entry) for entry in metered if _tensors(entry) == least]
    if len(names) == len(metered):
        return f"all {size(least)}"
    peer = of_peer(metered)
    if peer is not None and least > NEAR * _tensors(peer):
        return NONE_SMALLER
    figure = size(least) if peer is None else f"{times(least / _tensors(peer))} memory"
    return figure if implementation(after) in names else f"{names[0]} {figure}"


def _alone(entry: Entry) -> str:
    """The figures of a question's only implementation."""
    row = entry["extra_info"]
    said = [f"{row['implementation']} {milliseconds(entry['stats']['mean'])}"]
    if row["time"].get("ratio"):
        said.append(beside(ratio_to_peer(entry, peer=None), row["time"]["peer"]))
    if "tensors" in row["memory"]:
        said.append(size(row["memory"]["tensors"]))
    return ", ".join(said)


def size(nbytes: int) -> str:
    """As in "1.50 MiB"; below a hundredth of a MiB in bytes."""
    return f"{mib(nbytes)} MiB" if nbytes >= 2**20 / 100 else f"{nbytes:,} bytes"


def _metered(case: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in case if "tensors" in entry["extra_info"]["memory"]]


def _tensors(entry: Entry) -> int:
    return entry["extra_info"]["memory"]["tensors"]
