"""Memory and time budgets, and the statistics of their verdicts.

A memory budget is a formula times a stated slack. A time budget is a ratio to a peer measured in alternating rounds of
the same run; a confidence interval of the paired ratios decides, so noise alone neither passes nor fails it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardmark.registry import TimeBudget

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
NOT_STARTED, OUT_OF_MEMORY = "not started", "out of memory"

MIB = 2**20
CONFIDENCE = 0.95
RANKS_ALIKE = 1.01
"""The ranks' peaks may lie this far apart: the largest over the smallest."""

MEMORY_SLACK = 1.05
"""The default slack on a formula: room for small things that it leaves out, not for another tensor."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a median: `low` to `high`, holding it with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float

    def verdict(self, budget: float) -> str:
        """PASS when the whole interval is within the budget, FAIL when all of it is over, else UNDECIDED."""
        if self.coverage < CONFIDENCE:
            return UNDECIDED
        return PASS if self.high <= budget else FAIL if self.low > budget else UNDECIDED


def median_interval(samples: Sequence[float]) -> Interval:
    """The median of `samples` and its confidence interval from order statistics.

    Distribution-free: the number of samples below the true median is binomial(n, 1/2), so the interval between the
    k-th smallest and the k-th largest misses it with probability 2 P(X < k) (Conover, Practical Nonparametric
    Statistics, 3.2). The narrowest interval with at least 95% coverage is taken; with fewer than 6 samples there is
    none, and the whole range is returned with the coverage it has.
    """
    if not samples:
        raise ValueError("an interval needs at least one sample")
    ordered = sorted(samples)
    n = len(ordered)
    missed, k = 2 * 0.5**n, 1  # probability that the true median lies outside [1st smallest, 1st largest]
    while k < n / 2:
        wider_miss = missed + 2 * math.comb(n, k) * 0.5**n
        if 1 - wider_miss < CONFIDENCE:
            break
        missed, k = wider_miss, k + 1
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], max(0.0, 1 - missed))


def paired_ratios(seconds: Sequence[float], peer_seconds: Sequence[float]) -> list[float]:
    """Ratio of each round's time to the peer's time in the same round: drift of the machine cancels."""
    return [mine / theirs for mine, theirs in zip(seconds, peer_seconds, strict=True)]


@dataclass(frozen=True)
class MemoryBudget:
    """At most `formula` bytes times `slack` of tensors at the peak."""

    formula: int
    slack: float = MEMORY_SLACK

    @property
    def bytes(self) -> int:
        """The budget in bytes."""
        return math.floor(self.formula * self.slack)

    def verdict(self, nbytes: int) -> str:
        """PASS or FAIL: metered bytes carry no noise."""
        return PASS if nbytes <= self.bytes else FAIL


def combined(verdicts: Sequence[str]) -> str | None:
    """One verdict for a row: any failure fails it, then anything undecided leaves it undecided. None: no budget."""
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
        """Whether this budget speaks of that test; brackets in the pattern are literal, as test ids have them."""
        wildcards = re.escape(self.pattern).replace(r"\*", ".*").replace(r"\?", ".")
        return re.fullmatch(wildcards, test_id) is not None


def read_budgets(path: Path) -> list[AbsoluteBudget]:
    """Read a `--budgets` file: one table a pattern, with `seconds` (median) and `bytes` (peak) as its limits.

        ["perf/test_attention.py::*flash_pytorch*"]
        seconds = 0.05
        bytes = 100_000_000

    Raises BudgetFileError, in one line, on a file that is not there, is not TOML, or says anything else.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise BudgetFileError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BudgetFileError(f"{path} is not TOML: {error}") from error
    budgets = []
    for pattern, limits in tables.items():
        if not isinstance(limits, dict) or not limits or not set(limits) <= {"seconds", "bytes"}:
            raise BudgetFileError(f'{path}: ["{pattern}"] takes `seconds` and `bytes`, and nothing else')
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise BudgetFileError(f'{path}: ["{pattern}"] {name} = {value!r} is not a positive number')
        budgets.append(AbsoluteBudget(pattern, limits.get("seconds"), limits.get("bytes")))
    return budgets


def verdicts(
    tensors: Sequence[int],
    peaks: Sequence[int],
    seconds: list[float],
    ratio: Interval | None,
    time_budget: TimeBudget | None,
    memory_budget: MemoryBudget | None,
    absolute: Sequence[AbsoluteBudget],
) -> Iterator[tuple[str, str]]:
    """Each budget's verdict, with what to say when it is not met or not decided.

    `tensors` and `peaks` are each rank's bytes. The formula's budget is held to tensors, which are the same on every
    machine; a team's own to the whole peak, which is what its machine must have.
    """
    most, peak = max(tensors, default=None), max(peaks, default=None)
    if memory_budget is not None and most is not None:
        yield (
            memory_budget.verdict(most),
            f"{most / MIB:.2f} MiB of tensors at the peak, over the budget of {memory_budget.bytes / MIB:.2f} MiB "
            f"(formula {memory_budget.formula / MIB:.2f} MiB x {memory_budget.slack})",
        )
        least = min(tensors)
        yield (
            PASS if most <= least * RANKS_ALIKE else FAIL,
            f"the ranks' peaks lie between {least / MIB:.2f} and {most / MIB:.2f} MiB of tensors, "
            f"further apart than {RANKS_ALIKE - 1:.0%}",
        )
    if ratio is not None and time_budget is not None and time_budget.ratio is not None:
        yield (
            ratio.verdict(time_budget.ratio),
            f"{ratio.median:.3f}x {time_budget.peer}'s time, {ratio.coverage:.1%} interval "
            f"[{ratio.low:.3f}, {ratio.high:.3f}], against the budget of {time_budget.ratio}x",
        )
    for own in absolute:
        if own.bytes is not None and peak is not None:
            yield (
                MemoryBudget(own.bytes, slack=1).verdict(peak),
                f'peak of {peak:,} bytes, over the {own.bytes:,} of "{own.pattern}"',
            )
        if own.seconds is not None:
            step = median_interval(seconds)
            yield (
                step.verdict(own.seconds),
                f"{step.median:.6f} s, {step.coverage:.1%} interval [{step.low:.6f}, {step.high:.6f}], "
                f'against the {own.seconds} s of "{own.pattern}"',
            )
