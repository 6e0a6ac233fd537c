"""`--against-ref REF`: run each case in this version and in another commit; a row that got slower or larger fails.

    pytest perf -k fsdp --against-ref main

Each version has its own ranks (`shardmark.ranks.checkout`). The versions take turns in fresh processes
(`shardmark.rows.turns`), so both see the same machine; the verdict on time is taken from the ratio of this version's
time to the other's. Memory and counters are
compared exactly. A case that the other version lacks, or fails on, is not compared; the last lines say why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shardmark.meter.measure_case import measure
from shardmark.meter.plan import Measured, Plan, Rounds
from shardmark.ranks.checkout import Checkout
from shardmark.ranks.world import RankError, World
from shardmark.ranks.worlds import Worlds
from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import KINDS
from shardmark.rows.change_in_time import change_of
from shardmark.rows.comparison import Compared, Comparison, compare
from shardmark.rows.fill import counters_entry, memory_entry
from shardmark.rows.pairs import pairs_entry
from shardmark.rows.row import Row
from shardmark.rows.turns import HERE, Race, Run, race
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.slowdown import LARGEST, REF, slowdown

LONGEST_REASON = 200
"""Most characters shown of the reason why a case fails in the other version."""


class AgainstRef:
    """The pytest plugin of `--against-ref`: the other version, and the worlds that run it."""

    def __init__(
        self, checkout: Checkout, device: str, largest: float = LARGEST, accepted: Accepted | None = None
    ) -> None:
        self.largest = largest
        self.checkout = checkout
        self.name = printable(checkout.ref)
        self.worlds = Worlds(device, checkout=checkout)
        self._comparison = Comparison(largest, accepted)

    def judge(
        self, test_id: str, plan: Plan, row: Row, world: World, confidence: float, deadline: float
    ) -> list[tuple[str, str]]:
        """Compare a row with the other version: (verdict, text) of each figure. Sets the row's "ref"."""
        row["ref"] = {"name": self.name, "commit": self.checkout.commit}
        try:
            there = self._measure(plan, deadline)
            raced = self._race(plan, confidence, deadline)
        except _OtherVersionFails as failure:
            return self._comparison.add(test_id, dict.fromkeys(KINDS, f"that {self.name} fails on ({failure})"))
        memory, counters = memory_entry(there, plan.memory), counters_entry(there)
        if row["memory"]["tensors"] > memory["tensors"]:  # with several ranks one pass may overstate
            again = world.run(measure, _alone(plan, memory["tensors"]), deadline=deadline)
            now = min(row["memory"], memory_entry(again, plan.memory), key=lambda part: part["tensors"])
            row = {**row, "memory": now}
        pairs = raced.paired(confidence)
        row["ref"] |= {"ratio": pairs.ratio.center, "interval": pairs.ratio.ends, "pairs": pairs_entry(pairs)}
        old = BaselineRow.of({**row, "time": {}, "memory": memory, "counters": counters})
        text = f"the time that it takes in {self.name}"
        time = change_of(slowdown(pairs), REF, self.largest, text, raced.stalls)
        return self._comparison.add(test_id, {**compare(old, row, True, self.name), "time": [time]})

    def pytest_report_header(self) -> str:
        return f"against: {self.name}, commit {self.checkout.commit[:10]}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Report the comparison below everything else."""
        yield
        terminalreporter.section(f"against {self.name}", sep="-")
        self._comparison.write(terminalreporter)

    def compared(self) -> list[Compared]:
        """The comparison, for the report."""
        return [self._comparison.compared(f"{self.name} ({self.checkout.commit[:10]})")]

    def close(self) -> None:
        """End the other version's worlds and remove its files."""
        self.worlds.close()
        self.checkout.remove()

    def _there(self, run: Run, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on the other version's ranks; whatever it raises becomes `_OtherVersionFails`."""
        try:
            return run(function, *args)
        except Exception as error:
            raise _OtherVersionFails(_first_line(error)) from None

    def _measure(self, plan: Plan, deadline: float) -> list[Measured]:
        """Measure memory and counters of the case, without its peer, on each rank of the other version."""

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            return self.worlds.get(plan.world_size).run(function, *args, deadline=deadline)

        self._there(run, _check_origin, plan, self.checkout)
        return self._there(run, measure, _alone(plan))

    def _race(self, plan: Plan, confidence: float, deadline: float) -> Race:
        """Rounds in which the versions take turns, in fresh processes of both."""

        def start(name: str) -> World:
            if name == HERE:
                return World(plan.world_size, plan.device, checkout=self.checkout.as_it_is)
            try:
                return World(plan.world_size, plan.device, checkout=self.checkout)
            except Exception as error:
                raise _OtherVersionFails(_first_line(error)) from None

        def calls(name: str, world: World) -> Run:
            run = partial(world.run, deadline=deadline)
            return run if name == HERE else partial(self._there, run)

        return race(plan, start, calls, confidence, self.largest)


class _OtherVersionFails(Exception):
    """The other version raised; one-line message."""


def _first_line(error: Exception) -> str:
    cause = error.exception or error if isinstance(error, RankError) else error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)[:LONGEST_REASON]


def _alone(plan: Plan, tensors_before: int | None = None) -> Plan:
    """Plan one round of the case without its peer, for memory and counters."""
    bare = replace(plan, peer=None, limits=None, observers=(), trace=None, load=False)
    return replace(bare, rounds=Rounds(minimum=1, maximum=1), tensors_before=tensors_before)


def _check_origin(plan: Plan, checkout: Checkout) -> None:
    """Raise ImportError on a rank that has imported this version instead, as an editable install's finder does."""
    for target in (plan.workload, plan.implementation.target, type(plan.case)):
        file = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
        if file is not None and checkout.moved(file) != file:
            raise ImportError(f"imports {file}, which is this version's")
