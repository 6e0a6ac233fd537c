"""The answer to a question in a sentence or two, read from its rows.

    @pytest.mark.question("What does a nap cost?", short="naps", answer=fastest)

An answer is a function from entries to text, or to None where the entries do not hold the answer. It gets the entries
that count: with times (in a simulation, with bytes), of tests that did not fail. Among several cases it takes the one
with most work. Where an interval leaves a comparison open, the text says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from shardmark.report.ranking import (
    fastest_of,
    has_several,
    implementation,
    largest_case,
    of_peer,
    peer_of,
    ratio_to_peer,
    tensors,
    time_beside,
)
from shardmark.report.words import (
    beside,
    called,
    figure,
    is_fastest,
    milliseconds,
    sentence,
    share,
    size,
    where,
    with_doubt,
)
from shardmark.rows.columns import Entry, goal_outcomes
from shardmark.verdict.betting import FAIL

Answer = Callable[[Sequence[Entry]], str | None]

NO_ANSWER, NOT_MEASURED = "No answer", "Not measured"

NEAR = 0.99
"""A peak above this share of the peer's counts as no saving."""


def answered(entries: Sequence[Entry], how: Answer, failed: Collection[str] = ()) -> str:
    """The answer, followed by how many entries do not count and why.

    `failed` holds the full names of tests that failed. An exception in `how` becomes the text.
    """
    if entries and all(entry["extra_info"].get("simulated") for entry in entries):
        how = predicted
    counting = counted(entries, failed)
    reasons = Counter(why for entry in entries if (why := _left_out(entry, failed)))
    missing = ", ".join(f"{count} {why}" for why, count in reasons.items())
    try:
        text = how(counting) if counting else None
    except Exception as error:
        text = f"{NO_ANSWER}: {type(error).__name__}: {error}."
    if text is not None:
        return f"{text} Left out: {missing}." if missing else text
    return f"{NO_ANSWER}: {missing or 'its rows do not say'}."


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
        return sentence(where(case[0], entries), _alone(case[0]))
    first = fastest_of(case)
    said = [is_fastest(first, case), _smallest(case, after=first.entry)]
    return sentence(where(first.entry, entries), "; ".join(filter(None, said)))


def fastest(entries: Sequence[Entry]) -> str | None:
    """The fastest implementation, as a ratio to the common peer."""
    case = largest_case(entries)
    first = fastest_of(case)
    return sentence(where(first.entry, entries), is_fastest(first, case))


def saves(other: str | None = None) -> Answer:
    """The smallest peak and its time, as ratios to those of `other`, by default the common peer."""

    def answer(entries: Sequence[Entry]) -> str | None:
        case = _metered(largest_case(entries))
        if not case:
            return None
        least = min(case, key=_bytes)
        place, mine = where(least, entries), called(least)
        peer = peer_of(case)
        name = other or (peer and peer[1])
        others = [entry for entry in case if implementation(entry) == name]
        if not others or others[0] is least:
            return sentence(place, f"{mine} needs least memory, {size(_bytes(least))}")
        memory = share(_bytes(least) / _bytes(others[0]), "memory")
        time = time_beside(case, least, others[0])
        text = f"{mine} takes {memory} and {share(time.mid, 'time')} of {called(others[0])}"
        return sentence(place, with_doubt(text, time))

    return answer


def predicted(entries: Sequence[Entry]) -> str | None:
    """A simulation's answer: the fastest and the smallest peak; without times, the smallest peak beside the largest."""
    case = _metered(largest_case(entries))
    if not case:
        return None
    least, most = min(case, key=_bytes), max(case, key=_bytes)
    memory = f"{called(least)} is predicted to need least memory, {size(_bytes(least))}"
    if all(entry["stats"] for entry in case) and has_several(case):
        first = min(case, key=lambda entry: entry["stats"]["median"])
        time = f"{called(first)} is predicted to be fastest, {milliseconds(first['stats']['median'])}"
        return sentence(where(first, entries), f"{time}; {memory}")
    if not has_several(case):
        return sentence(where(least, entries), f"{called(least)} is predicted to need {size(_bytes(least))}")
    if _bytes(least) < _bytes(most):
        memory += f", {share(_bytes(least) / _bytes(most), 'memory')} of {called(most)}"
    return sentence(where(least, entries), memory)


def most(value: Callable[[Entry], float | None], words: str) -> Answer:
    """The largest `value`, in words such as "{name} reaches {value:.0%} of the roofline"."""

    def answer(entries: Sequence[Entry]) -> str | None:
        found = [(number, entry) for entry in entries if (number := value(entry)) is not None]
        if not found:
            return None
        number, entry = max(found, key=lambda each: each[0])
        return sentence(where(entry, entries), words.format(name=called(entry), value=number))

    return answer


def goals(entries: Sequence[Entry]) -> str | None:
    """How many goals were reached, missed and left undecided."""
    counts = Counter(outcome for entry in entries for _, outcome in goal_outcomes(entry["extra_info"]))
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"Goals: {said}." if said else None


def _smallest(case: Sequence[Entry], after: Entry) -> str | None:
    """The smallest peak in words; "it" is `after`, the fastest, which was just named."""
    metered = _metered(case)
    if not metered:
        return None
    least = min(metered, key=_bytes)
    names = [implementation(entry) for entry in metered if _bytes(entry) == _bytes(least)]
    if len(names) == len(metered):
        return f"all need the same memory, {size(_bytes(least))}"
    peer = of_peer(metered)
    if peer is not None and _bytes(least) > NEAR * _bytes(peer):
        return f"none needs less memory than {called(peer)}"
    name = "it" if implementation(after) in names else called(least)
    if peer is None:
        return f"{name} needs least memory, {size(_bytes(least))}"
    return f"{name} needs least memory, {figure(_bytes(least) / _bytes(peer))} of that of {called(peer)}"


def _alone(entry: Entry) -> str:
    """The figures of a question's only implementation."""
    row = entry["extra_info"]
    said = f"{called(entry)} takes {milliseconds(entry['stats']['median'])}"
    if row["time"].get("ratio"):
        said += f", {beside(ratio_to_peer(entry), row['time']['peer'])}"
    if (needed := tensors(entry)) is not None:
        said += f"; it needs {size(needed)}"
    return said


def _metered(case: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in case if tensors(entry) is not None]


def _bytes(entry: Entry) -> int:
    """Tensors at the peak of an entry that was metered."""
    nbytes: int = entry["extra_info"]["memory"]["tensors"]
    return nbytes
