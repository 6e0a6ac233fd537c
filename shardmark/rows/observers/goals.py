"""Goals for the share of the machine that a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, cast

from shardmark.meter.plan import Measured
from shardmark.rows.fill import step_seconds
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row
from shardmark.verdict.betting import SHOWN_CONFIDENCE, fewest_rounds, interval
from shardmark.verdict.budget import WORTH


class Goals(Observer):
    """Goals for "mfu" or "fraction" of the row's limit: the least that each should be. Reported; they fail no test."""

    min_rounds = fewest_rounds(SHOWN_CONFIDENCE)

    def __init__(self, **goals: float) -> None:
        self.goals = goals

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """Fill "goals" of the row's "limit". Each figure is work over step time, so the interval of the step time
        decides."""
        seconds, limit = step_seconds(ranks), cast(dict[str, Any], row["limit"])
        step = interval(seconds)
        longest = {name: (1 + WORTH) * limit[name] * median(seconds) / goal for name, goal in self.goals.items()}
        limit["goals"] = {
            name: {"goal": goal, "outcome": step.outcome(longest[name])} for name, goal in self.goals.items()
        }
