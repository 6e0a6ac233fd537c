"""The answer to a question in a sentence or two, read from its rows.

    @pytest.mark.question("What does a nap cost?", short="naps", answer=fastest)

An answer is a function from entries to text, or to None where the entries do not hold the answer. It gets the entries
that count: with times (in a simulation, with bytes), of tests that did not fail. Among several cases it takes the one
with most work. Where an interval leaves a comparison open, the text says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import wraps

from shardmark.report.ranking import (
    fastest_of,
    has_several,
    implementation,
    is_simulated,
    largest_case,
    of_peer,
    peer_of,
    ratio_to_peer,
    tensors,
    time_over,
)
from shardmark.report.words import (
    called,
    called_peer,
    either,
    figure,
    is_fastest,
    milliseconds,
    sentence,
    share,
    size,
    time_of,
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
    counting = counted(entries, failed)
    reasons = Counter(why for entry in entries if (why := _left_out(entry, failed)))
    missing = ", ".join(f"{count} {why}" for why, count in reasons.items())
    try:
        text = how(counting) if counting else None
    except Exception as error:  # a simulation does not have all that a measured row has
        text = None if is_simulated(counting) else f"{NO_ANSWER}: {type(error).__name__}: {error}."
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


def _or_predicted(how: Answer) -> Answer:
    """The answer `how`; to a simulation, whose times have no interval, `predicted`."""

    @wraps(how)
    def answer(entries: Sequence[Entry]) -> str | None:
        return predicted(entries) if is_simulated(entries) else how(entries)

    return answer


@_or_predicted
def fastest_and_smallest(entries: Sequence[Entry]) -> str | None:
    """The fastest implementation and the smallest peak: the answer of a question that declares none."""
    case = largest_case(entries)
    if not has_several(case):
        return sentence(where(case[0], entries), _alone(case[0]))
    first = fastest_of(case)
    said = [is_fastest(first, case), _smallest(case, after=first.entry)]
    return sentence(where(first.entry, entries), "; ".join(filter(None, said)))


@_or_predicted
def fastest(entries: Sequence[Entry]) -> str | None:
    """The fastest implementation, as a ratio to the common peer."""
    case = largest_case(entries)
    if not has_several(case):
        return sentence(where(case[0], entries), _alone(case[0]))
    first = fastest_of(case)
    return sentence(where(first.entry, entries), is_fastest(first, case))


def saves(other: str | None = None) -> Answer:
    """The smallest peak and its time, as ratios to those of `other`, by default the common peer."""

    @_or_predicted
    def answer(entries: Sequence[Entry]) -> str | None:
        case = _metered(largest_case(entries))
        if not case:
            return None
        least = min(case, key=_bytes)
        place, mine = where(least, entries), called(least)
        if not has_several(case):
            return sentence(place, _alone(least))
        peer = peer_of(case)
        name = other or (peer and peer[1])
        others = [entry for entry in case if implementation(entry) == name]
        if not others or others[0] is least:
            text = f"{mine} needs least memory, {size(_bytes(least))}"
            if not others and least["extra_info"]["time"].get("ratio"):
                text += f", and takes {time_of(called_peer(least), ratio_to_peer(least))}"
            return sentence(place, text)
        memory = share(_bytes(least) / _bytes(others[0]), "memory")
        time = time_over(case, least, others[0])
        text = f"{mine} takes {memory} and {share(time.mid, 'time')} of {called(others[0])}"
        return sentence(place, with_doubt(text, time))

    return answer


def predicted(entries: Sequence[Entry]) -> str | None:
    """A simulation's answer: the fastest and the smallest peak; without times, the smallest peak beside the largest."""
    case = _metered(largest_case(entries))
    if not case:
        return None
    place, needed = where(case[0], entries), [size(_bytes(entry)) for entry in case]
    if not has_several(case):
        return sentence(place, f"{called(case[0])} is predicted to need {needed[0]}")
    least, most = min(case, key=_bytes), max(case, key=_bytes)
    memory = _first_predicted(case, needed, size(_bytes(least)), "need least memory", "need the same memory")
    if all(entry["stats"] for entry in case):
        took = [milliseconds(entry["stats"]["median"]) for entry in case]
        shortest = milliseconds(min(entry["stats"]["median"] for entry in case))
        time = _first_predicted(case, took, shortest, "be fastest", "take the same time")
        return sentence(place, f"{time}; {memory}")
    if _bytes(least) < _bytes(most):
        memory += f", {share(_bytes(least) / _bytes(most), 'memory')} of {called(most)}"
    return sentence(place, memory)


def _first_predicted(case: Sequence[Entry], shown: Sequence[str], best: str, what: str, alike: str) -> str:
    """The implementations whose shown figure is the best one, as in "DDP or ZeRO-1 is predicted to be fastest"."""
    first = [entry for entry, each in zip(case, shown, strict=True) if each == best]
    if len(first) == len(case):
        return f"all are predicted to {alike}, {best}"
    return f"{either(first)} is predicted to {what}, {best}"


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
    if peer is not None and _bytes(least) >= NEAR * _bytes(peer):
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
        said += f", {time_of(called_peer(entry), ratio_to_peer(entry))}"
    if (needed := tensors(entry)) is not None:
        said += f"; it needs {size(needed)}"
    return said


def _metered(case: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in case if tensors(entry) is not None]


def _bytes(entry: Entry) -> int:
    """Tensors at the peak of an entry that was metered."""
    nbytes: int = entry["extra_info"]["memory"]["tensors"]
    return nbytes
