"""One time for each implementation of a case, and one ratio for each pair, over a whole run.

A machine's speed changes from test to test; the ratio of two steps that took turns does not. So times of a case are
stated at one speed. The first pair fixes the times of both; each later implementation takes its ratio times the time of
its peer. The quotient of two times is then their ratio, and a pair that was timed once is not timed again: the ratio is
read both ways.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shardmark.verdict.betting import interval, paired_ratios
from shardmark.verdict.slowdown import Pairs


@dataclass(frozen=True)
class CaseKey:
    """The identity of a case's times: implementations are compared where all of these are equal."""

    step: str | None
    """The workload's name; the question, where a test measures by its own means."""
    family: str
    case: str
    world_size: int


@dataclass
class _Known:
    """Times of one case, in seconds; each timed pair's rounds, and those of further, fresh processes."""

    seconds: dict[str, float] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Pairs] = field(default_factory=dict)
    fresh: dict[tuple[str, str], list[Pairs]] = field(default_factory=dict)


class CaseTimes:
    """The times and pairs of a run so far.

    An implementation is to be timed after its peer: two pairs that share none fix two speeds, and a third pair that
    joins them cannot agree with both.
    """

    def __init__(self) -> None:
        self._cases: defaultdict[CaseKey, _Known] = defaultdict(_Known)

    def add(self, case: CaseKey, name: str, peer: str, pairs: Sequence[Pairs]) -> None:
        """Keep rounds of a pair that fresh processes timed."""
        if pairs:
            self._cases[case].fresh.setdefault((name, peer), []).extend(pairs)

    def fresh(self, case: CaseKey, name: str, peer: str) -> list[Pairs]:
        """The rounds of fresh processes in which these two were timed, in seconds; empty if there were none."""
        known = self._cases[case].fresh
        if (name, peer) in known:
            return known[name, peer]
        return [(theirs, mine) for mine, theirs in known.get((peer, name), [])]

    def pairs(self, case: CaseKey, name: str, peer: str) -> Pairs | None:
        """The rounds in which these two were timed, in seconds; None if they were not yet."""
        known = self._cases[case].pairs
        if (name, peer) in known:
            return known[name, peer]
        return known[peer, name][::-1] if (peer, name) in known else None

    def ratios(self, case: CaseKey, name: str, peer: str) -> list[float] | None:
        """The ratios of the rounds in which these two were timed, as `name` over `peer`; None if they were not yet."""
        pairs = self.pairs(case, name, peer)
        return None if pairs is None else paired_ratios(*pairs)

    def pace(
        self, case: CaseKey, name: str, seconds: Sequence[float], peer: str | None, peer_seconds: Sequence[float]
    ) -> float:
        """Measured median over the stated time of `name`; 1 where either is 0. Without `peer_seconds` no pair was
        timed."""
        known = self._cases[case]
        times = known.seconds
        if peer is not None and peer_seconds:
            known.pairs[name, peer] = seconds, peer_seconds
            ratio = interval(paired_ratios(seconds, peer_seconds)).center
            if name in times:
                times.setdefault(peer, times[name] / ratio)
            else:
                between = math.sqrt(median(seconds) * median(peer_seconds) / ratio)
                times[name] = ratio * times.setdefault(peer, between)
        measured = median(seconds)
        return measured / stated if measured and (stated := times.setdefault(name, measured)) else 1.0
