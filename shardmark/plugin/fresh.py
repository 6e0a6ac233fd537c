"""Time a case in fresh processes, as a comparison with an earlier run needs them.

A machine's caches and clock rates change within seconds to minutes, and processes that start right after each other
meet the same. So what seems slower is timed again after pauses, and the rows of a new baseline are timed again
once all tests have run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shardmark.meter.again import time_again
from shardmark.meter.plan import LOAD, PEER, Measured, Plan
from shardmark.ranks.worlds import Worlds
from shardmark.rows.against import Against
from shardmark.rows.case_times import CaseKey, CaseTimes
from shardmark.rows.pairs import NAMES, paired_with, sums
from shardmark.text import printable
from shardmark.verdict.slowdown import FEWEST_PAIRS, FEWEST_PROCESSES, Gate, Paired

PATIENCE = 60.0
"""Seconds after which no further process is started."""
PAUSE = 8.0
"""Seconds before a process that is to confirm a slowdown."""
MOST_SECONDS = 30.0
"""Seconds of a process's rounds from which on it has fewer of them."""
STEPS_OF_A_ROUND = 3
MOST_PROCESSES = 6
"""Most processes of a case in one run."""


@dataclass
class Fresh:
    """A case of the run, and the ranks' measurements in each fresh process so far."""

    plan: Plan
    confidence: float
    deadline: float
    step: float
    """Seconds of the step in the run's own process."""
    processes: list[list[Measured]] = field(default_factory=list)

    def pairs(self) -> dict[str, Paired]:
        """The pairs of all processes, by the name of the other step."""
        return sums({name: paired_with(name, self.processes) for name in NAMES}, {}, self.confidence)

    def add_process(self, worlds: Worlds) -> list[Measured]:
        """Time the case in a new process."""
        rounds = self.plan.rounds
        affordable = int(MOST_SECONDS / max(STEPS_OF_A_ROUND * self.step, 1e-9))
        least = max(rounds.minimum, min(math.ceil(FEWEST_PAIRS / FEWEST_PROCESSES), affordable))
        plan = replace(self.plan, limits=None, rounds=replace(rounds, minimum=least))
        with worlds.fresh(plan.world_size) as world:
            self.processes.append(world.run(time_again, plan, deadline=self.deadline))
        return self.processes[-1]

    def decide(self, gate: Gate, worlds: Worlds) -> None:
        """Add processes until the gate is decided or PATIENCE is over."""
        began = time.monotonic()
        self.add_process(worlds)
        while len(self.processes) < MOST_PROCESSES and not gate.decided(self.pairs()):
            if time.monotonic() - began > PATIENCE:
                break
            time.sleep(PAUSE)
            self.add_process(worlds)


@dataclass
class BaselineRows:
    """The cases of a run that writes a baseline, by their tests; each is timed once with its test, then twice more."""

    times: CaseTimes
    rows: dict[str, tuple[Fresh, CaseKey, str | None]] = field(default_factory=dict)
    """By test: the case, the place of its times, and its peer, which another row may have timed."""

    def again(self, worlds: Worlds) -> Iterator[str]:
        """Time all cases again, pass by pass; says which."""
        for number in range(2, FEWEST_PROCESSES + 1) if self.rows else ():
            yield f"timing each row again, in a fresh process: {number} of {FEWEST_PROCESSES}"
            for test_id, (fresh, key, _) in self.rows.items():
                try:
                    ranks, plan = fresh.add_process(worlds), fresh.plan
                except Exception as error:  # what was measured stays
                    yield f"{test_id} has {len(fresh.processes)} processes: {next(iter(str(error).splitlines()), '')}"
                    continue
                if plan.peer is not None:
                    self.times.add(key, plan.implementation.name, plan.peer.name, paired_with(PEER, [ranks]))

    def pairs(self, test_id: str) -> dict[str, Paired]:
        """The pairs of the test's case in all processes."""
        fresh, key, peer = self.rows[test_id]
        found = {LOAD: paired_with(LOAD, fresh.processes)}
        if peer is not None:
            found[PEER] = self.times.fresh(key, fresh.plan.implementation.name, peer)
        return sums(found, {}, fresh.confidence)


class TimesAgain:
    """The pytest plugin that times the rows of a new baseline again once all tests have run."""

    def __init__(self, rows: BaselineRows, against: Against, worlds: Worlds) -> None:
        self._rows = rows
        self._against = against
        self._worlds = worlds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result = yield
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in self._rows.again(self._worlds):
            if terminal is not None:
                terminal.ensure_newline()
                terminal.write_line(printable(line))
        for test_id in self._rows.rows:
            self._against.set_pairs(test_id, self._rows.pairs(test_id))
        return result
