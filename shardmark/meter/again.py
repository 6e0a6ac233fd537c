"""Time a case in a process that has not seen it before."""

from __future__ import annotations

from dataclasses import replace

from shardmark.meter.measure_case import timed_rounds, warmed_up
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Measured, Plan

WARMUPS = 10
"""Warm-ups, of a second at most: a fresh process's allocator learns which blocks come back."""


def time_again(plan: Plan) -> Measured:
    """Time the case's rounds on this rank: nothing is metered, counted or observed."""
    rounds = replace(plan.rounds, warmups=WARMUPS, max_warmup_seconds=1.0)
    return timed_rounds(replace(plan, observers=(), rounds=rounds), Memory(), warmed_up(plan))
