"""Disturbances while a case was timed, as far as the times, the kernel's scheduler and the GPU show them.

They show whether a quieter machine is needed, and what disturbs this one. A time budget does not use them, as a
disturbance widens its interval. There is one exception: ranks whose threads waited for a core
(`shardmark.verdict.budget.verdicts`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NOTED = 0.05
"""Smallest disturbance that is reported, as a share of a step's time."""
_BURST = 0.25
"""A burst is longer than the rounds around it by this share."""
_AROUND = 8
"""Rounds before a round, and rounds after it, that a burst is compared with."""
_PLACES = 64
"""Number of places, spread over the rounds, at which a change of level is tried."""
_FEWEST = 16
"""Fewest rounds; with fewer, only waiting is reported."""
_CERTAIN = 4.0
"""A change of this many standard errors is not chance."""

WAITED, WARMUP, DRIFT, LEVEL, BURSTS = "waited", "warm-up", "drift", "level", "bursts"
POWER, HEAT, SLOWDOWN = "power", "heat", "slowdown"
THROTTLED = (POWER, HEAT, SLOWDOWN)
"""Clocks of the GPU that power or heat lowered; of a slowdown the GPU does not say which."""


@dataclass(frozen=True)
class Threads:
    """For each thread of this process, the seconds so far for which it ran, and for which it was ready to run and had
    no core. Empty if the kernel does not count."""

    seconds: Mapping[str, tuple[float, float]]

    @classmethod
    def now(cls) -> Threads:
        seconds, tasks = {}, Path("/proc/self/task")
        for thread in os.listdir(tasks) if tasks.exists() else ():
            with suppress(OSError, ValueError):  # ended in the meantime; no such statistics
                ran, waited, _ = map(int, (tasks / thread / "schedstat").read_text().split())
                seconds[thread] = ran / 1e9, waited / 1e9
        return cls(seconds)

    def waited(self, before: Threads, computing: int) -> float:
        """Seconds since `before` in which other processes had the core that this rank needed.

        The larger of two figures: the mean wait of the `computing` threads that ran most, and the longest wait of any
        other thread, such as Gloo's, less the time in which the rank's own threads ran. A message of a collective waits
        for such a thread, so each message may cost a turn of another process, some 5 ms.
        """
        since = []
        for thread, (ran, waited) in self.seconds.items():
            ran_before, waited_before = before.seconds.get(thread, (0.0, 0.0))
            since.append((ran - ran_before, waited - waited_before))
        since.sort()
        compute, others = since[-computing:], since[:-computing]
        all_ran = sum(ran for ran, _ in since)
        mean = sum(waited for _, waited in compute) / computing
        return max([mean, *(waited - (all_ran - ran) for ran, waited in others)])


def disturbances(seconds: Sequence[float], peer_seconds: Sequence[float], waited: float) -> dict[str, float]:
    """Disturbances by name, as shares of a step's time; `waited` is the share of the rounds that a thread waited for a
    core.

    A warm-up is the share by which the first rounds took longer. A drift is the share by which the last ones took
    longer, reached in small steps; a level is reached at once and lasts, as when the clock rate changes. Bursts are the
    share of rounds that are longer than those around them. `peer_seconds` may be empty.
    """
    found = {WAITED: waited} if waited >= NOTED else {}
    series = np.log(np.maximum(seconds, 1e-12))
    if len(peer_seconds) == len(seconds):  # changes that both have in common come from the machine
        series = (series + np.log(np.maximum(peer_seconds, 1e-12))) / 2
    if len(series) < _FEWEST:
        return found
    usual = _medians_around(series)
    bursts = float(np.mean(series > usual + _BURST))
    if bursts >= NOTED:
        found[BURSTS] = bursts
    found |= _change(series)
    return found


def in_words(found: dict[str, float]) -> str:
    """The disturbances of a case in one line; empty without any."""
    clock_or_neighbour = "a neighbour comes or goes" if WAITED in found else "the clock rate changes"
    said = {
        WAITED: "its threads waited {:.0%} of the time for a core, which others had",
        POWER: "the power limit lowered the GPU's clocks for {:.0%} of the time",
        HEAT: "heat lowered the GPU's clocks for {:.0%} of the time",
        SLOWDOWN: "the GPU's hardware lowered its clocks for {:.0%} of the time, as for heat or power",
        BURSTS: "{:.0%} of the rounds were bursts",
        WARMUP: "the first rounds were {:.0%} slower",
        DRIFT: "a drift of {:+.0%}",
        LEVEL: f"all at once {{:+.0%}}, as when {clock_or_neighbour}",
    }
    return "; ".join(words.format(found[name]) for name, words in said.items() if name in found)


def _change(series: NDArray[np.float64]) -> dict[str, float]:
    """The warm-up, level or drift that explains most of the series, if it is significant."""
    n = len(series)
    spread = 1.4826 * float(np.median(np.abs(np.diff(series)))) / 2**0.5 + 1e-9
    places = sorted({2 + i * (n - 5) // _PLACES for i in range(_PLACES + 1)})
    jumps = [float(np.median(series[k:]) - np.median(series[:k])) for k in places]
    left = [float(np.abs(series - _step_at(series, k)).sum()) for k in places]
    best = int(np.argmin(left))
    place, jump = places[best], jumps[best]
    slope, start = np.polyfit(np.arange(n), series, 1)
    line = float(np.abs(series - (start + slope * np.arange(n))).sum())
    error = spread * (1 / min(place, n - place)) ** 0.5
    if line < left[best]:
        change = float(np.expm1(slope * n))
        return {DRIFT: change} if abs(change) >= NOTED and abs(slope) * n > _CERTAIN * spread * (12 / n) ** 0.5 else {}
    if abs(np.expm1(jump)) < NOTED or abs(jump) < _CERTAIN * error:
        return {}
    if place <= n // 4 and jump < 0:
        return {WARMUP: float(np.expm1(-jump))}
    return {LEVEL: float(np.expm1(jump))}


def _step_at(series: NDArray[np.float64], place: int) -> NDArray[np.float64]:
    return np.where(np.arange(len(series)) < place, np.median(series[:place]), np.median(series[place:]))


def _medians_around(series: NDArray[np.float64]) -> NDArray[np.float64]:
    n = len(series)
    return np.array([np.median(series[max(0, i - _AROUND) : i + _AROUND + 1]) for i in range(n)])
