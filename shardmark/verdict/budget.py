"""Budgets and goals, and their verdicts.

A memory budget is a formula times a stated slack. A time budget is a ratio to a peer measured in the same run, in pairs
in random order; an interval of that ratio decides (`shardmark.verdict.betting`): noise alone decides nothing.
A budget fails its test; a goal is judged in the same way and reported as reached or missed.

On CPU a collective's message passes through threads, each of which needs a core for a moment. Beside a process that
computes on that core, each message costs a turn of that process, milliseconds where it else costs a tenth of one. So
the time of a step on ranks is then the number of its messages, and a ratio says which of two steps sends more of them:
a time budget of ranks whose threads waited for a core does not fail.

A run has many verdicts, so their error is held over the whole run: the chance that any interval of a budget misses is
at most `FAMILY_WISE_ERROR`, of which each verdict gets an equal share (Bonferroni). Goals fail nothing: each has a 95%
interval of its own, from the rounds that there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmark.api.registry import Race
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval, decided, interval, paired_ratios
from shardmark.verdict.patterns import matches, read_tables

NOT_STARTED, OUT_OF_MEMORY = "not started", "out of memory"

MIB = 2**20

FAMILY_WISE_ERROR = 0.01
"""The chance that noise makes any time verdict of a run wrong."""

SMALLEST_EFFECT = 0.01
"""A ratio to a peer may exceed its budget by this share: equal code may differ by where its memory lies."""

WORTH = 0.05
"""A goal is also reached up to this share beyond it, as nobody chooses a technique for less."""

RANKS_ALIKE = 1.01
"""Largest allowed ratio of the ranks' peaks, the largest over the smallest."""

MEMORY_SLACK = 1.05
"""Default slack of a formula: room for small things that it leaves out, not for another tensor."""


def confidence(judgements: int) -> float:
    """Confidence of each of that many intervals, so that all of them hold with 1 - FAMILY_WISE_ERROR."""
    return 1 - FAMILY_WISE_ERROR / max(judgements, 1)


def tolerated(budget: float) -> float:
    """The largest ratio to a peer that counts as within the budget."""
    return budget * (1 + SMALLEST_EFFECT)


@dataclass(frozen=True)
class Limits:
    """The limits that a case's rounds must decide: of the ratio to the peer, and of the step in seconds."""

    confidence: float
    ratios: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def undecided(self, seconds: Sequence[float], peer_seconds: Sequence[float] | None) -> bool:
        """Whether the rounds so far leave a verdict open. Without a peer no ratio is judged."""
        samples = [(seconds, limit) for limit in self.seconds]
        if peer_seconds is not None:
            samples += [(paired_ratios(seconds, peer_seconds), tolerated(limit)) for limit in self.ratios]
        return not all(decided(values, limit, self.confidence) for values, limit in samples)


@dataclass(frozen=True)
class MemoryBudget:
    """At most `formula` bytes times `slack` of tensors at the peak, and `expected_workspace` of operators beside them.

    `source` is a "formula", or a "prediction" for the rank that needs most.
    """

    formula: int
    slack: float = MEMORY_SLACK
    expected_workspace: int = 0
    source: str = "formula"
    alike: bool = True
    """Whether a formula holds for every rank; otherwise it is that of the rank that needs most."""

    @property
    def needed(self) -> int:
        """Bytes that must be available before the case starts."""
        return self.formula + self.expected_workspace

    @property
    def bytes(self) -> int:
        """The budget in bytes."""
        return math.floor(self.formula * self.slack)

    def verdict(self, nbytes: int) -> str:
        """PASS or FAIL: metered bytes carry no noise."""
        return PASS if nbytes <= self.bytes else FAIL


def combined(verdicts: Sequence[str]) -> str | None:
    """One verdict for a row: FAIL if any is, else UNDECIDED if any is, else PASS; None without a budget."""
    if not verdicts:
        return None
    return FAIL if FAIL in verdicts else UNDECIDED if UNDECIDED in verdicts else PASS


class BudgetFileError(ValueError):
    """A `--budgets` file that cannot be used, in one line."""


@dataclass(frozen=True)
class AbsoluteBudget:
    """A team's own limits for the tests whose id matches `pattern`; `*` and `?` are the wildcards."""

    pattern: str
    seconds: float | None = None
    bytes: int | None = None

    def matches(self, test_id: str) -> bool:
        """Whether the pattern matches that test."""
        return matches(self.pattern, test_id)


def read_budgets(path: Path) -> list[AbsoluteBudget]:
    """Read a `--budgets` file: one table a pattern, with `seconds` (of a step) and `bytes` (peak) as its limits.

        ["perf/test_attention.py::*flash_pytorch*"]
        seconds = 0.05
        bytes = 100_000_000

    Raises BudgetFileError, in one line, on a file that is not there, is not TOML, or says anything else.
    """
    tables = read_tables(path, "--budgets", BudgetFileError)
    budgets = []
    for pattern, limits in tables.items():
        if not isinstance(limits, dict) or not limits or not set(limits) <= {"seconds", "bytes"}:
            raise BudgetFileError(f'--budgets {path}: ["{pattern}"] takes `seconds` and `bytes`, and nothing else')
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise BudgetFileError(f'--budgets {path}: ["{pattern}"] {name} = {value!r} is not a positive number')
        budgets.append(AbsoluteBudget(pattern, limits.get("seconds"), limits.get("bytes")))
    return budgets


def _told_apart(*sizes: int) -> list[str]:
    """Sizes in MiB; in bytes where two sizes that differ would read the same."""
    shown = [f"{nbytes / MIB:.2f} MiB" for nbytes in sizes]
    return shown if len(set(shown)) == len(set(sizes)) else [f"{nbytes:,} bytes" for nbytes in sizes]


def verdicts(
    tensors: Sequence[int],
    peaks: Sequence[int],
    seconds: list[float],
    ratio: Interval | None,
    race: Race | None,
    memory_budget: MemoryBudget | None,
    absolute: Sequence[AbsoluteBudget],
    confidence: float,
    ranks_waited: float = 0.0,
) -> Iterator[tuple[str, str]]:
    """Each budget's verdict, and the message if it is not PASS.

    `tensors` and `peaks` are each rank's bytes. A formula's budget limits tensors, which are equal on every machine. A
    team's own budget limits the whole peak, which its machine must have. `confidence` is that of the intervals of
    seconds, whose limits have no tolerance. `ranks_waited` is the share of the rounds for which a thread of one of
    several ranks waited for a core; 0 if that is nothing worth noting.
    """
    most, peak = max(tensors, default=None), max(peaks, default=None)
    if memory_budget is not None and most is not None:
        sizes = _told_apart(most, memory_budget.bytes, memory_budget.formula)
        yield (
            memory_budget.verdict(most),
            f"{sizes[0]} of tensors at the peak, over the budget of {sizes[1]} ({memory_budget.source} {sizes[2]} x "
            f"{memory_budget.slack})",
        )
    if memory_budget is not None and most is not None and memory_budget.source == "formula" and memory_budget.alike:
        least = min(tensors)
        yield (
            PASS if most <= least * RANKS_ALIKE else FAIL,
            f"the ranks' peaks lie between {least / MIB:.2f} and {most / MIB:.2f} MiB of tensors, "
            f"further apart than {RANKS_ALIKE - 1:.0%}",
        )
    if ratio is not None and race is not None and race.budget is not None:
        found = ratio.verdict(tolerated(race.budget))
        against = f"{ratio.center:.3f}x {race.peer}'s time, {ratio}, against the budget of {race.budget}x"
        if ranks_waited and found == FAIL:
            yield UNDECIDED, f"{against}: not judged beside processes that take the ranks' cores"
        else:
            yield found, f"{against} and {SMALLEST_EFFECT:.0%}, the smallest effect that matters"
    for own in absolute:
        if own.bytes is not None and peak is not None:
            yield (
                MemoryBudget(own.bytes, slack=1).verdict(peak),
                f'peak of {peak:,} bytes, over the {own.bytes:,} of "{own.pattern}"',
            )
        if own.seconds is not None:
            step = interval(seconds, confidence)
            yield (
                step.verdict(own.seconds),
                f'{step.center:.6f} s, {step}, against the {own.seconds} s of "{own.pattern}"',
            )
