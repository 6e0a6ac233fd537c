"""The clearest comparisons of a run, each in a sentence, and what the run leaves undecided.

A finding compares an implementation with the peer of its race, in one case: the time where the 95% interval of the
ratio excludes 1, and time or memory where it differs by 5% or more. Its figures are the row's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.report.answers import NO_ANSWER, NOT_MEASURED, counted
from shardmark.report.questions import OTHERS
from shardmark.report.ranking import Span, implementation, ratio_to_peer, same_case, tensors, who
from shardmark.report.summary import Summary
from shardmark.report.words import called, called_peer, leaves_open, share, where, with_doubt
from shardmark.rows.columns import Entry

DIFFERS = 0.05
"""Least relative difference of two times or two peaks that is worth a sentence."""

MOST_BARS = 5
"""Most implementations in a finding's picture, its peer among them."""


@dataclass(frozen=True)
class Finding:
    """A comparison of two implementations: a sentence, the question that it belongs to, and its picture."""

    sentence: str
    question: str
    bars: tuple[tuple[str, float, float | None], ...]
    """(implementation, time relative to the peer, memory relative to the peer): the peer first, with 1.0, then the one
    that the sentence is about."""
    weight: float
    """Effect on time and memory together, in powers of two."""


@dataclass(frozen=True)
class _Pair:
    """An implementation beside a peer, in one case."""

    mine: Entry
    peer: Entry | None
    """None where the peer has no row in the case."""
    is_raced: bool

    @property
    def time(self) -> Span:
        """The ratio of their times: the race's, otherwise the quotient of the medians, or 1 where one is 0."""
        if self.is_raced:
            return ratio_to_peer(self.mine)
        mine, theirs = (0.0 if each is None else each["stats"]["median"] for each in (self.mine, self.peer))
        return Span(0.0, mine / theirs if mine and theirs else 1.0, math.inf)

    @property
    def differs_in_time(self) -> bool:
        """Whether the interval of the ratio excludes 1, and the ratio is at least 5% from 1."""
        return self.time.is_decided and abs(self.time.mid - 1) >= DIFFERS

    @property
    def memory(self) -> float | None:
        """The ratio of their tensors at the peak; None where one has none or was not metered."""
        mine, theirs = tensors(self.mine), None if self.peer is None else tensors(self.peer)
        return mine / theirs if mine and theirs else None

    @property
    def differs_in_memory(self) -> bool:
        return self.memory is not None and abs(self.memory - 1) >= DIFFERS

    @property
    def gain(self) -> float:
        """Powers of two that it saves, time and memory together; negative where it costs more.

        An undecided time counts if it is a loss.
        """
        time = -math.log2(self.time.mid) if self.time.is_decided or self.time.mid > 1 else 0.0
        return time - (math.log2(self.memory) if self.memory is not None and self.differs_in_memory else 0.0)

    @property
    def subject(self) -> tuple[str, str, str]:
        """Family, implementation and peer: two findings with one subject say much the same."""
        return self.mine["extra_info"]["family"], implementation(self.mine), self.called_peer

    @property
    def called_peer(self) -> str:
        return called_peer(self.mine) if self.peer is None else called(self.peer)


def findings(summary: Summary, most: int = 8) -> list[Finding]:
    """At most `most` findings, the largest effect first: one a question, and of each family one before any second."""
    best: list[tuple[_Pair, Finding]] = []
    for text, entries in _by_question(summary):
        clear = [pair for pair in _pairs(entries) if pair.differs_in_time or pair.differs_in_memory]
        if clear:
            pair = max(clear, key=lambda each: each.gain)
            if pair.gain <= 0:  # none saves anything: the one that shows best what the peer saves
                pair = min(clear, key=lambda each: each.gain)
            best.append((pair, Finding(_sentence(pair, entries), text, _bars(pair, entries), abs(pair.gain))))
    best.sort(key=lambda each: -each[1].weight)
    families: dict[str, Finding] = {}
    subjects: dict[tuple[str, str, str], Finding] = {}
    for pair, finding in best:
        families.setdefault(pair.subject[0], finding)
        subjects.setdefault(pair.subject, finding)
    chosen = list(dict.fromkeys([*families.values(), *subjects.values()]))[:most]
    return sorted(chosen, key=lambda each: -each.weight)


def undecided(summary: Summary) -> list[str]:
    """A sentence for each question without a finding whose answer is undecided, or that was not measured."""
    found = {each.question for each in findings(summary)}
    said = [
        (text or OTHERS, answer) for text, _, answer in summary.questions.answers(summary.entries, summary.outcomes)
    ]
    return [
        f"{text} {answer}"
        for text, answer in said
        if text not in found and (leaves_open(answer) or answer.startswith((NO_ANSWER, NOT_MEASURED)))
    ]


def verdict(summary: Summary) -> str:
    """How the run ended, in one sentence."""
    outcomes = summary.outcomes
    failed, passed, open_ = len(outcomes.failed), len(outcomes.passed), len(outcomes.undecided)
    ran = failed + passed + open_
    if failed:
        text = f"{failed} of {ran} tests failed." if ran > 1 else "The only test failed."
    elif open_:
        are = "the only one is" if ran == 1 else f"{open_} of {ran} {'is' if open_ == 1 else 'are'}"
        text = f"No test failed, and {are} undecided."
    elif passed:
        all_of = {1: "The only test", 2: "Both tests"}.get(ran, f"All {ran} tests")
        but = "but rows are not in the file that was asked for" if summary.lacks_rows else "every budget was met"
        text = f"{all_of} passed{', ' if summary.lacks_rows else ': '}{but}."
    else:
        text = "No test ran to its end."
    if outcomes.has_ended() and summary.has_outcomes:
        return text
    why = (
        "The run ended before its last test."
        if summary.has_outcomes
        else "The file has rows alone, and no tests' ends."
    )
    return f"{why} So far: {text[:1].lower()}{text[1:]}"


def _by_question(summary: Summary) -> Iterator[tuple[str, list[Entry]]]:
    """Each question with the entries that count and have times."""
    groups: dict[str, list[Entry]] = {}
    for entry in counted(summary.entries, summary.outcomes.failed):
        if entry["stats"] is not None:
            groups.setdefault(entry["group"] or OTHERS, []).append(entry)
    yield from groups.items()


def _pairs(entries: Sequence[Entry]) -> list[_Pair]:
    """Each metered implementation of a question beside the peer of its race.

    Without any race, each beside the one with most memory, in the case of most implementations.
    """
    cases: dict[str, list[Entry]] = {}
    for entry in entries:
        if tensors(entry) is not None:
            cases.setdefault(same_case(entry), []).append(entry)
    raced = any(entry["extra_info"]["time"].get("ratio") for entry in entries)
    if raced or not cases:
        return [pair for case in cases.values() for pair in _raced(case)]
    return [*_with_the_largest(max(cases.values(), key=len))]


def _raced(case: Sequence[Entry]) -> Iterator[_Pair]:
    for mine in case:
        row = mine["extra_info"]
        peer = row["family"], row["time"].get("peer")
        if row["time"].get("ratio"):
            yield _Pair(mine, next((each for each in case if who(each) == peer), None), True)


def _with_the_largest(case: Sequence[Entry]) -> Iterator[_Pair]:
    largest = max(case, key=lambda each: tensors(each) or 0)
    yield from (_Pair(mine, largest, False) for mine in case if mine is not largest)


def _sentence(pair: _Pair, entries: Sequence[Entry]) -> str:
    """As in "At 2,048 tokens, SDPA takes 0.39 of the time and 0.079 of the memory of eager attention."."""
    place, name, memory, peer = where(pair.mine, entries), called(pair.mine), pair.memory, pair.called_peer
    is_predicted = pair.mine["extra_info"].get("simulated")
    takes = "is predicted to take" if is_predicted else "takes"
    start = f"{place}, {name} {takes}" if place else f"{name[:1].upper()}{name[1:]} {takes}"
    less, time = share(memory, "memory") if memory is not None else "", share(pair.time.mid, "time")
    if is_predicted:  # without intervals
        return f"{start} {less} and {time} of {peer}."
    if not pair.time.is_decided:
        return f"{with_doubt(f'{start} {less} of {peer}', pair.time)}."
    if not pair.differs_in_time:
        return f"{start} {less} of {peer}, in about the same time."
    if pair.differs_in_memory:
        return f"{start} {time} and {less} of {peer}."
    alike = "" if memory is None else " in the same memory" if memory == 1 else " in about the same memory"
    return f"{start} {time} of {peer}{',' * bool(alike)}{alike}."


def _bars(pair: _Pair, entries: Sequence[Entry]) -> tuple[tuple[str, float, float | None], ...]:
    """The peer, the implementation, and the fastest of the others beside the same peer."""
    others = [each for each in _pairs(entries) if each.peer is not None and each.peer is pair.peer]
    others = [each for each in others if each.mine is not pair.mine]
    shown = [pair, *sorted(others, key=lambda each: each.time.mid)]
    bars = [(called(each.mine), each.time.mid, each.memory) for each in shown]
    return (pair.called_peer, 1.0, None if pair.memory is None else 1.0), *bars[: MOST_BARS - 1]
