"""The `measure` fixture: admit a case, measure it on a world, judge it by its budgets, save its row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import pytest

from shardmark import budget, registry
from shardmark.budget import MEMORY_SLACK, MemoryBudget, TimeBudget, median_interval
from shardmark.hardware import Work
from shardmark.memory import available_bytes, is_out_of_memory
from shardmark.passes import Measured, Plan, Rounds, Workload, measure
from shardmark.registry import Implementation
from shardmark.rows import Row, limit_entry, memory_entry, new_row, step_seconds, time_entry
from shardmark.world import RankError

if TYPE_CHECKING:
    from shardmark.session import Session

MIB = 2**20
DEADLINE = 1800.0
"""Seconds for all rounds of one case: long, as paper-scale cases are, and short of a night."""


class Measure:
    """Measure one case and hold it to its budgets; a test calls it once.

        measure(TrainingStep, implementation, case, work=work(case, world.size), world_size=world.size)

    `workload` is a module-level class (`shardmark.passes.Workload`); `work` is what one step does on all ranks; `rates`
    turns the mean step time into further figures of the row's work. The memory budget is the implementation's own
    formula times `slack`, the time budget its own ratio to its peer. The row is saved whatever the verdict. Over
    budget, the test fails; where the rounds leave a time budget undecided, or the case would not fit, it is skipped
    with the reason.
    """

    def __init__(self, session: Session, item: pytest.Item, benchmark: Any) -> None:
        self._session = session
        self._item = item
        self._benchmark = benchmark

    def __call__(
        self,
        workload: type[Workload],
        implementation: Implementation,
        case: Any,
        *,
        work: Work,
        world_size: int = 1,
        slack: float = MEMORY_SLACK,
        rates: Callable[[float], dict[str, float]] = lambda seconds: {},
    ) -> Row:
        """Returns the row."""
        session = self._session
        peer = self._peer(implementation)
        plan = Plan(workload, implementation, peer, case, session.device, world_size, self._rounds())
        row = new_row(plan, session.scale)
        memory_budget = MemoryBudget(_formula(implementation, case), slack)
        self._admit(row, memory_budget, memory_budget.formula + (_formula(peer, case) if peer else 0), world_size)
        try:
            ranks = session.worlds.get(world_size).run(measure, plan, deadline=DEADLINE)
        except RankError as error:
            if not is_out_of_memory(error.exception):
                raise
            self._unmeasured(row, budget.OUT_OF_MEMORY)
            pytest.fail(f"out of memory: {error.exception}", pytrace=False)

        seconds = step_seconds(ranks)
        self._replay(seconds)
        row["backend"] = ranks[0].backend
        row["memory"] = memory_entry(ranks, memory_budget)
        row["work"] = asdict(work) | rates(fmean(seconds))
        devices = world_size if session.device == "cuda" else 1
        row["limit"] = limit_entry(work, session.roofline(case.dtype), devices, fmean(seconds))
        row["time"], complaints = self._judge(row, ranks, memory_budget, implementation.time)
        if not self._benchmark.disabled:
            self._save(row, {"mean": fmean(seconds), "stddev": stdev(seconds) if len(seconds) > 1 else 0.0})
        if row["verdict"] == budget.FAIL:
            pytest.fail("; ".join(complaints), pytrace=False)
        if row["verdict"] == budget.UNDECIDED and not self._benchmark.disabled:
            pytest.skip("undecided: " + "; ".join(complaints))
        return row

    def _peer(self, implementation: Implementation) -> Implementation | None:
        """The implementation that its time budget names, if that is another one and runs here."""
        if implementation.time is None:
            return None
        peer = registry.family(implementation.family).implementations[implementation.time.peer]
        return None if peer.target is implementation.target or peer.missing(self._session.device) else peer

    def _rounds(self) -> Rounds:
        """pytest-benchmark's options, the test's own marker first."""
        marker = self._item.get_closest_marker("benchmark")
        own = marker.kwargs if marker else {}

        def option(name: str) -> Any:
            return own.get(name, self._session.config.getoption(f"benchmark_{name}"))

        if self._benchmark.disabled:
            return Rounds(minimum=1, maximum=1)
        return Rounds(
            minimum=option("min_rounds"),
            max_seconds=float(option("max_time")),
            warmups=option("warmup_iterations") if option("warmup") else 2,
            max_warmup_seconds=float(option("max_time")) if option("warmup") else math.inf,
            disable_gc=option("disable_gc"),
        )

    def _admit(self, row: Row, memory_budget: MemoryBudget, formula: int, world_size: int) -> None:
        """Skip a case that would not fit by its own formula, with a row that says what it needs and what there is."""
        world = self._session.worlds.get(world_size)
        needed = formula * (1 if self._session.device == "cuda" else world_size)  # ranks on CPU share the RAM
        available = min(world.run(available_bytes, self._session.device))
        if needed <= available:
            return
        row["memory"] = {
            "formula": memory_budget.formula,
            "slack": memory_budget.slack,
            "budget": memory_budget.bytes,
            "needed": needed,
            "available": available,
        }
        self._unmeasured(row, budget.NOT_STARTED)
        pytest.skip(f"not started: needs {needed / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available")

    def _judge(
        self, row: Row, ranks: list[Measured], memory_budget: MemoryBudget, time_budget: TimeBudget | None
    ) -> tuple[Row, list[str]]:
        """Set the row's verdict; the row's time, and a line for every budget that is not met or not decided."""
        verdicts: list[str] = []
        complaints: list[str] = []

        def judge(verdict: str, complaint: str) -> None:
            verdicts.append(verdict)
            if verdict != budget.PASS:
                complaints.append(complaint)

        peak = row["memory"]["peak"]
        judge(
            memory_budget.verdict(peak),
            f"peak of {peak / MIB:.2f} MiB, over the budget of {memory_budget.bytes / MIB:.2f} MiB "
            f"(formula {memory_budget.formula / MIB:.2f} MiB x {memory_budget.slack})",
        )
        time, ratio = time_entry(ranks, time_budget)
        if ratio is not None and time_budget is not None and time_budget.ratio is not None:
            judge(
                ratio.verdict(time_budget.ratio),
                f"{ratio.median:.3f}x {time_budget.peer}'s step time, {ratio.coverage:.1%} interval "
                f"[{ratio.low:.3f}, {ratio.high:.3f}], against the budget of {time_budget.ratio}x",
            )
        for own in self._session.budgets_for(self._item.nodeid):
            if own.bytes is not None:
                judge(
                    MemoryBudget(own.bytes, slack=1).verdict(peak),
                    f'peak of {peak:,} bytes, over the {own.bytes:,} of --budgets "{own.pattern}"',
                )
            if own.seconds is not None:
                step = median_interval(step_seconds(ranks))
                judge(
                    step.verdict(own.seconds),
                    f"step time of {step.median:.6f} s, {step.coverage:.1%} interval [{step.low:.6f}, {step.high:.6f}],"
                    f' against the {own.seconds} s of --budgets "{own.pattern}"',
                )
        row["verdict"] = budget.combined(verdicts)
        return time, complaints

    def _replay(self, seconds: list[float]) -> None:
        """Hand the measured times to pytest-benchmark, round by round, through the clock it reads."""
        clock, remaining = self._session.clock, iter(seconds)
        self._benchmark.pedantic(lambda: clock.advance(next(remaining)), setup=clock.reset, rounds=len(seconds))

    def _unmeasured(self, row: Row, verdict: str) -> None:
        self._benchmark.skipped = True  # so that pytest-benchmark does not warn of an unused fixture
        row["verdict"] = verdict
        self._save(row, None)

    def _save(self, row: Row, stats: dict[str, float] | None) -> None:
        if stats is not None:
            self._benchmark.extra_info.update(row)
        self._session.rows.add(
            {
                "group": self._benchmark.group,
                "name": self._benchmark.name,
                "fullname": self._benchmark.fullname,
                "stats": stats,
                "extra_info": row,
            }
        )


def _formula(implementation: Implementation, case: Any) -> int:
    """The implementation's peak in bytes, by its formula."""
    if implementation.memory is None:
        raise ValueError(f"{implementation.family} {implementation.name} is registered without a memory formula")
    return implementation.memory(case)
