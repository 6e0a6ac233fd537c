"""`--against-ref REF`: run each case in this version and in another commit; a row that got slower or larger fails.

    pytest perf -k fsdp --against-ref main

Each version has its own ranks (`shardmark.ranks.checkout`). The versions take turns, round by round, so both see the
same machine; the verdict on time is taken from the ratio of this version's time to the other's. Memory and counters are
compared exactly. A case that the other version lacks, or fails on, is not compared; the last lines say why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shardmark.api.workload import Workload
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import measure, rounds_while, shuffled, timed_step, warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Measured, Plan, Rounds
from shardmark.ranks.checkout import Checkout
from shardmark.ranks.world import RankError, World, Worlds
from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import KINDS, Change
from shardmark.rows.comparison import Compared, Comparison, compare
from shardmark.rows.fill import counters_entry, memory_entry
from shardmark.rows.row import Row
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.betting import Interval, decided, fewest_rounds, interval, paired_ratios
from shardmark.verdict.budget import tolerated

HERE, THERE = "here", "there"

LONGEST_REASON = 200
"""Most characters shown of the reason why a case fails in the other version."""

_live: list[tuple[Plan, Workload]] = []
"""On a rank: the plan and the workload that it is timing."""


class AgainstRef:
    """The pytest plugin of `--against-ref`: the other version, and the worlds that run it."""

    def __init__(self, checkout: Checkout, device: str, accepted: Accepted | None = None) -> None:
        self.checkout = checkout
        self.name = printable(checkout.ref)
        self.worlds = Worlds(device, checkout=checkout)
        self._comparison = Comparison(accepted)

    def judge(
        self, test_id: str, plan: Plan, row: Row, world: World, confidence: float, deadline: float
    ) -> list[tuple[str, str]]:
        """Compare a row with the other version: (verdict, text) of each figure. Sets the row's "ref"."""
        row["ref"] = {"name": self.name, "commit": self.checkout.commit}
        try:
            there = self._measure(plan, deadline)
            ratio = self._race(plan, world, confidence, deadline)
        except _OtherVersionFails as failure:
            return self._comparison.add(test_id, dict.fromkeys(KINDS, f"that {self.name} fails on ({failure})"))
        memory, counters = memory_entry(there, plan.memory), counters_entry(there)
        if row["memory"]["tensors"] > memory["tensors"]:  # with several ranks one pass may overstate
            again = world.run(measure, _alone(plan, memory["tensors"]), deadline=deadline)
            now = min(row["memory"], memory_entry(again, plan.memory), key=lambda part: part["tensors"])
            row = {**row, "memory": now}
        row["ref"] |= {"ratio": ratio.center, "interval": ratio.ends}
        old = BaselineRow.of({**row, "time": {}, "memory": memory, "counters": counters})
        text = f"{ratio.center:.3f}x the time that it takes in {self.name}, {ratio}"
        time = Change(
            ratio.verdict(tolerated(1.0)), text, better=tolerated(ratio.high) < 1, figure="step time", interval=ratio
        )
        return self._comparison.add(test_id, {**compare(old, row, None, True, self.name), "time": [time]})

    def pytest_report_header(self) -> str:
        return f"against: {self.name}, commit {self.checkout.commit[:10]}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Report the comparison below everything else."""
        yield
        terminalreporter.section(f"against {self.name}", sep="-")
        self._comparison.write(terminalreporter)

    def compared(self) -> Compared:
        """The comparison, for the report."""
        return self._comparison.compared(f"{self.name} ({self.checkout.commit[:10]})")

    def close(self) -> None:
        """End the other version's worlds and remove its files."""
        self.worlds.close()
        self.checkout.remove()

    def _there(self, size: int, function: Callable[..., Any], *args: Any, deadline: float) -> list[Any]:
        """Call a function on the other version's ranks; whatever it raises becomes `_OtherVersionFails`."""
        try:
            return self.worlds.get(size).run(function, *args, deadline=deadline)
        except Exception as error:
            cause = error.exception or error if isinstance(error, RankError) else error
            line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            raise _OtherVersionFails(line[:LONGEST_REASON]) from None

    def _measure(self, plan: Plan, deadline: float) -> list[Measured]:
        """Measure memory and counters of the case, without its peer, on each rank of the other version."""
        self._there(plan.world_size, _check_origin, plan, self.checkout, deadline=deadline)
        return self._there(plan.world_size, measure, _alone(plan), deadline=deadline)

    def _race(self, plan: Plan, world: World, confidence: float, deadline: float) -> Interval:
        """The ratio of this version's time to the other's, from rounds in which they take turns."""
        calls = {
            HERE: partial(world.run, deadline=deadline),
            THERE: partial(self._there, plan.world_size, deadline=deadline),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}

        def undecided() -> bool:
            return not decided(paired_ratios(seconds[HERE], seconds[THERE]), tolerated(1.0), confidence)

        try:
            warm = [lap for call in calls.values() for lap in call(_begin, plan)]
            ahead = max(lap.host or 0.0 for lap in warm)
            first = max(fewest_rounds(confidence), plan.rounds.count(max(lap.seconds for lap in warm)))
            for _ in rounds_while(undecided, first, plan.rounds):
                for name in shuffled(list(calls)):
                    seconds[name].append(max(lap.seconds for lap in calls[name](_step, ahead)))
        finally:
            for each in (world, self.worlds.get(plan.world_size)):
                if each.alive:
                    each.run(_end)
        return interval(paired_ratios(seconds[HERE], seconds[THERE]), confidence)


class _OtherVersionFails(Exception):
    """The other version raised; one-line message."""


def _alone(plan: Plan, tensors_before: int | None = None) -> Plan:
    """Plan one round of the case without its peer, for memory and counters."""
    rounds = Rounds(minimum=1, maximum=1)
    return replace(plan, peer=None, limits=None, observers=(), trace=None, rounds=rounds, tensors_before=tensors_before)


def _check_origin(plan: Plan, checkout: Checkout) -> None:
    """Raise ImportError on a rank that has imported this version instead, as an editable install's finder does."""
    for target in (plan.workload, plan.implementation.target, type(plan.case)):
        file = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
        if file is not None and checkout.moved(file) != file:
            raise ImportError(f"imports {file}, which is this version's")


def _begin(plan: Plan) -> Laps:
    """Make the workload on this rank, warm it up and time one step."""
    _live[:] = [(plan, warmed_up(plan))]
    return _step(0.0)


def _step(ahead: float) -> Laps:
    ((plan, workload),) = _live
    return timed_step(plan, workload, workload.step, ahead)


def _end() -> None:
    device = _live[0][0].device if _live else "cpu"
    _live.clear()
    release(device)
