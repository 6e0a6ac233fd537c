"""How much longer a step takes than another, or than before: by the median, by the mean, and between processes.

A **slowdown** fails if the median is shown to be larger in at least three fresh processes, or the mean in six. It
passes if all three bounds lie below the largest slowdown that a user wants to exclude:

- the interval of the median, by bets on the pairs (`shardmark.verdict.betting`);
- the ratio of the mean steps and two standard errors: a step in twenty that takes three times as long moves no median;
- the spread between processes, by Student's t: a process keeps its layout of memory, so its pairs share one shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

from shardmark.verdict.betting import FAIL, PASS, SHORTEST, UNDECIDED, Interval, interval, paired_ratios
from shardmark.verdict.budget import SMALLEST_EFFECT

LARGEST = 0.05
"""Default of --largest-slowdown, which a pass excludes."""
FEWEST_PAIRS = 100
"""Fewest pairs of a pass: a stall in twenty steps is among fewer by luck alone once in 170 times."""
FEWEST_PROCESSES = 3
"""Fewest fresh processes that show a slowdown before it fails."""
FEWEST_FOR_A_MEAN = 6
"""Fewest fresh processes whose mean steps show a slowdown: in replays of equal versions three erred 7 times as much."""
USUAL_PROCESSES = 5
"""Fresh processes of both versions that share the FEWEST_PAIRS of a pass, if steps are long: processes differ more than
pairs of one do, so more pairs of each would say less."""
UNSTEADY = 0.2
"""The run's own process, in which other cases ran before, may shift a ratio by this share: SDPA took 0.90 of eager
attention's time in one, 0.76 in fresh ones."""

_PROCESSES_PER_OUTLIER = 6
"""One process in so many may lie where a neighbour pushed it."""

_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T_998 = (318.3, 22.33, 10.21, 7.173, 5.893, 5.208, 4.785, 4.501, 4.297, 4.144)
"""Student's t, two-sided, for 1 to 10 degrees of freedom; the last one holds for more. That of a failure is larger, as
it is looked at after each process."""

LOAD_EFFECT = 0.2
"""Smallest effect of a ratio to the calibration load: between two runs it moves, as products and copies meet other
clock rates and neighbours than a step does. In one run, one collective more took 1.21 times as long by it."""
RUN_EFFECT = 0.05
"""Smallest effect of a ratio to the peer in two runs: all processes of a run share more than the machine. In ten runs
of equal code the ratios of two steps below 1 ms had standard deviations of 1.5% and 2.8%; within a run, of 2%."""
REF = "ref"
EFFECTS = {REF: SMALLEST_EFFECT, "peer": RUN_EFFECT, "load": LOAD_EFFECT}
"""By what a step was paired with: the same step in another commit, its peer, or the load."""

_STALL = 1.5
"""A step that takes this many times the median is a stall."""
_FEWEST_STALLS = 3

Pairs = tuple[Sequence[float], Sequence[float]]
"""Seconds of the steps of one process, and of the steps that they were paired with."""


@dataclass(frozen=True)
class Paired:
    """One step's time over another's, by the pairs of one or more processes."""

    ratio: Interval
    """The median ratio; its ends are 0 and infinity after too few pairs."""
    mean: float
    """The quotient of the mean steps."""
    mean_error: float
    """Two standard errors of `mean`; by the processes' means where these differ more."""
    processes: tuple[float, ...]
    """The median ratio in each fresh process; empty where the pairs are of the run's own process, which other cases
    have used."""
    means: tuple[float, ...]
    """The quotient of the mean steps in each fresh process."""
    pairs: int


@dataclass(frozen=True)
class Slowdown:
    """A step's time now over its time before. `low` and `high` bound the shift between processes by 99.8% and 95%
    intervals; without three processes they are 0 and infinity. `processes` is 0 where either run has no fresh ones."""

    ratio: Interval
    mean: float
    mean_error: float
    low: float
    high: float
    least: float
    """The smallest ratio of a process; of six or more, outliers are left out, one in six."""
    least_mean: float
    """The same of the quotient of a process's mean steps."""
    processes: int
    pairs: int

    @property
    def not_excluded(self) -> float:
        """The largest slowdown that is not excluded, as a share; infinity where nothing is."""
        if self.pairs < FEWEST_PAIRS:
            return math.inf
        bounds = [self.ratio.high, self.mean + self.mean_error]
        if self.processes:
            return max(0.0, max([*bounds, self.high]) - 1)
        return max(0.0, max(bounds) * (1 + UNSTEADY) - 1)

    @property
    def uncertainty(self) -> float:
        """How far the bounds lie above the ratio itself, as a share."""
        return (1 + self.not_excluded) / self.ratio.center - 1

    def shown(self, effect: float = SMALLEST_EFFECT) -> bool:
        """Whether the pairs show a median or a mean beyond that effect, whatever the processes."""
        return self.ratio.low > 1 + effect or self._in_mean(effect)

    @property
    def needed(self) -> int:
        """Fresh processes that a failure needs."""
        return FEWEST_PROCESSES if self.ratio.low > 1 else FEWEST_FOR_A_MEAN

    def _in_mean(self, effect: float) -> bool:
        """Whether the mean is beyond that effect by four standard errors."""
        return self.mean - 2 * self.mean_error > 1 + effect

    def verdict(self, largest: float = LARGEST, effect: float = SMALLEST_EFFECT) -> str:
        """FAIL for a slowdown beyond `effect`, shown in three fresh processes, of the mean in six, or beyond UNSTEADY
        in the run's own; PASS if none of over `largest` is left possible; else UNDECIDED."""
        if not self.processes:
            return FAIL if self.shown(max(effect, UNSTEADY)) else PASS if self.not_excluded <= largest else UNDECIDED
        in_median = self.ratio.low > 1 + effect and self.low > 1 and self.least > 1 + effect / 2
        in_mean = self._in_mean(effect) and self.least_mean > 1 + effect / 2
        if (in_median and self.processes >= FEWEST_PROCESSES) or (in_mean and self.processes >= FEWEST_FOR_A_MEAN):
            return FAIL
        return PASS if self.not_excluded <= largest and not self.shown(effect) else UNDECIDED

    @property
    def faster(self) -> bool:
        """Whether the step is shown to be faster than before."""
        beyond = self.ratio.high * (1 + SMALLEST_EFFECT) < 1 and self.mean + self.mean_error < 1
        return beyond and (math.isinf(self.high) or self.high < 1)

    def __str__(self) -> str:
        spread = "" if math.isinf(self.high) else f", {self.processes} processes"
        return f"{self.ratio}, mean {self.mean:.3f} ± {self.mean_error:.3f}{spread}"


def paired(processes: Sequence[Pairs], confidence: float, fresh: bool = True) -> Paired:
    """Sum up the pairs of each process, fresh ones or the run's own. Raises ValueError without a pair."""
    timed = [tuple(np.maximum(steps, SHORTEST) for steps in pairs) for pairs in processes]
    seconds, peer_seconds = (np.concatenate([pairs[i] for pairs in timed]) for i in (0, 1))
    mean = float(seconds.sum() / peer_seconds.sum())
    residuals = (seconds - mean * peer_seconds) / peer_seconds.mean()
    error = 2 * float(residuals.std(ddof=1)) / math.sqrt(len(seconds)) if len(seconds) > 1 else math.inf
    means = tuple(float(mine.sum() / theirs.sum()) for mine, theirs in timed) if fresh else ()
    if len(means) >= FEWEST_PROCESSES:
        error = max(error, error_of_processes(means))
    ratios = [paired_ratios(*pairs) for pairs in processes]
    together = interval([ratio for each in ratios for ratio in each], confidence)
    return Paired(together, mean, error, tuple(median(each) for each in ratios) if fresh else (), means, len(seconds))


def error_of_processes(means: Sequence[float]) -> float:
    """Half the width of the 95% interval of several processes' mean, by Student's t."""
    return _T_95[min(len(means) - 1, len(_T_95)) - 1] * stdev(means) / math.sqrt(len(means))


def slowdown(now: Paired, before: Paired | None = None) -> Slowdown:
    """The slowdown since `before`; without it `now` compares two versions by itself."""
    if before is None:
        ratio, mean, error = now.ratio, now.mean, now.mean_error
    else:
        confidence = min(now.ratio.confidence, before.ratio.confidence)
        low, high = now.ratio.low / before.ratio.high, now.ratio.high / (before.ratio.low or math.ulp(0))
        ratio = Interval(now.ratio.center / before.ratio.center, low, high, confidence)
        mean = now.mean / before.mean
        error = mean * math.hypot(now.mean_error / now.mean, before.mean_error / before.mean)
    groups = [np.log(each.processes) for each in (now, before) if each is not None]
    if not all(len(group) for group in groups):
        return Slowdown(ratio, mean, error, 0.0, math.inf, 0.0, 0.0, 0, now.pairs)
    ratios = groups[0] - (groups[1].mean() if len(groups) > 1 else 0.0)
    center, freedom = float(ratios.mean()), sum(len(group) - 1 for group in groups)
    bounds = 0.0, math.inf
    if freedom > 1:
        variance = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom
        error_of_center = math.sqrt(variance * sum(1 / len(group) for group in groups))
        place = min(freedom, len(_T_95)) - 1
        bounds = math.exp(center - _T_998[place] * error_of_center), math.exp(center + _T_95[place] * error_of_center)
    least = math.exp(_least(ratios.tolist()))
    least_mean = _least(now.means) / (1.0 if before is None else before.mean)
    return Slowdown(ratio, mean, error, *bounds, least, least_mean, len(now.processes), now.pairs)


def _least(of_processes: Sequence[float]) -> float:
    return sorted(of_processes)[len(of_processes) // _PROCESSES_PER_OUTLIER]


@dataclass(frozen=True)
class Gate:
    """The comparisons that fresh processes are to decide: with earlier pairs, by the name of what a step was paired
    with ("peer" or "load")."""

    before: tuple[tuple[str, Paired], ...]
    largest: float = LARGEST

    def decided(self, now: Mapping[str, Paired]) -> bool:
        """Whether the processes so far decide each comparison."""
        return all(
            judged(each, name, self.largest) != UNDECIDED or not (decides or each.shown(EFFECTS[name]))
            for each, name, decides in self._found(now)
        )

    def _found(self, now: Mapping[str, Paired]) -> Iterator[tuple[Slowdown, str, bool]]:
        """Each slowdown, its name, and whether it must be decided: beside a peer, the load can only fail."""
        has_peer = any(name == "peer" and name in now for name, _ in self.before)
        for name, before in self.before:
            if name in now:
                yield slowdown(now[name], before), name, name == "peer" or not has_peer


def allowed(name: str, largest: float) -> float:
    """The slowdown that a pass excludes, of a ratio to the "ref", the "peer" or the "load"."""
    return largest + LOAD_EFFECT - SMALLEST_EFFECT if name == "load" else largest


def judged(found: Slowdown, name: str, largest: float) -> str:
    """The verdict on a ratio to the "ref", the "peer" or the "load"."""
    return found.verdict(allowed(name, largest), EFFECTS[name])


def stalls(seconds: Sequence[float], peer_seconds: Sequence[float]) -> str:
    """The stalls in words, as "1 step in 20 takes 3.0x"; empty where the other steps stall as often."""
    usual = max(median(seconds), SHORTEST)
    long = [each / usual for each in seconds if each > _STALL * usual]
    others = sum(each > _STALL * median(peer_seconds) for each in peer_seconds) / len(peer_seconds)
    if len(long) < _FEWEST_STALLS or len(long) / len(seconds) < 2 * others:
        return ""
    return f"1 step in {len(seconds) / len(long):.0f} takes {fmean(long):.1f}x"
