"""The `measure` fixture: admit a case, measure it on a world, judge it by its budgets, save its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from shardmark import budget, registry
from shardmark.budget import MEMORY_SLACK, MIB, SHOWN_CONFIDENCE, AbsoluteBudget, Limits, MemoryBudget, fewest_rounds
from shardmark.grid import Work
from shardmark.kernels import StepProfile
from shardmark.memory import available_bytes, is_out_of_memory
from shardmark.passes import measure
from shardmark.plan import Measured, Plan, Rounds, Workload
from shardmark.registry import Implementation, Race
from shardmark.rows import (
    Row,
    limit_entry,
    limit_goals,
    memory_entry,
    new_row,
    profile_entry,
    stages_entry,
    step_seconds,
    time_entry,
    timeline_entry,
)
from shardmark.world import RankError

if TYPE_CHECKING:
    from shardmark.session import Session

T = TypeVar("T")

CASE_DEADLINE = 1800.0
"""Seconds for all rounds of one case: long, as paper-scale cases are, and short of a night."""


class Measure:
    """Measure one case and hold it to its budgets; a test calls it once.

        measure(TrainingStep, implementation, case, work=work(case, world.size), world_size=world.size)

    `workload` is a module-level class (`shardmark.plan.Workload`); `work` is what one step does on all ranks; `rates`
    turns the mean step time into further figures of the row's work. The memory budget is the implementation's own
    formula times `slack`, the race `time`, or else its own against its peer, the rounds `rounds`, or else
    pytest-benchmark's, and more while a verdict is undecided. The row is saved whatever the verdict. Over budget, the
    test fails; where the rounds leave a time budget undecided, or the case would not fit, it is skipped with the
    reason. Goals, the race's and those of figures of the row's limit in `goals` ("mfu", "fraction"), are reported.

    With `profiled` one more step runs under the profiler, and what that makes of the first rank's profile is the row's
    "kernels". `activations`, bytes by module and operator, stand beside those metered of a workload that tells the
    kinds of its tensors, `stages`, bytes live, beside those of one that tells stages.
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
        time: Race | None = None,
        goals: Mapping[str, float] | None = None,
        rounds: Rounds | None = None,
        profiled: Callable[[StepProfile], Row] | None = None,
        activations: Mapping[tuple[str, str], int] | None = None,
        stages: Mapping[str, int] | None = None,
    ) -> Row:
        """Returns the row."""
        __tracebackhide__ = True
        session = self._session
        race = time or implementation.time
        if race is not None and not race.applies(case, session.device):
            race = Race(race.peer)
        peer = self._peer(implementation, race)
        least = fewest_rounds(SHOWN_CONFIDENCE) if goals else 1
        plan = Plan(workload, implementation, peer, case, session.device, world_size, self._rounds(rounds, least))
        trace = session.trace.stem(self._item.nodeid, f"{case}-{implementation}") if session.trace else None
        memory_budget = MemoryBudget(_formula(implementation, case), slack)
        plan = replace(plan, limits=self._limits(race), formula=memory_budget.formula)
        plan = replace(plan, profiled=profiled is not None, trace=trace)
        ranks = self.attempt(
            plan, lambda plan: session.worlds.get(world_size).run(measure, plan, deadline=CASE_DEADLINE), slack
        )
        return self.record(
            plan,
            ranks,
            race,
            memory_budget,
            work,
            rates,
            goals=goals,
            profiled=profiled,
            activations=activations,
            stages=stages,
        )

    def attempt(self, plan: Plan, run: Callable[[Plan], list[T]], slack: float = MEMORY_SLACK) -> list[T]:
        """What `run` returns, if the case fits and memory does not run out; else its row says so, and the test ends."""
        __tracebackhide__ = True
        memory_budget = MemoryBudget(_formula(plan.implementation, plan.case), slack)
        plan = self._admit(plan, memory_budget)
        try:
            return run(plan)
        except Exception as error:
            cause = error.exception if isinstance(error, RankError) else error
            if not is_out_of_memory(cause):
                raise
            self._unmeasured(plan, memory_budget, budget.OUT_OF_MEMORY)
            pytest.fail(f"out of memory: {cause}", pytrace=False)

    def record(
        self,
        plan: Plan,
        ranks: list[Measured],
        race: Race | None = None,
        memory_budget: MemoryBudget | None = None,
        work: Work | None = None,
        rates: Callable[[float], dict[str, float]] = lambda seconds: {},
        goals: Mapping[str, float] | None = None,
        absolute: Sequence[AbsoluteBudget] = (),
        times: Row | None = None,
        profiled: Callable[[StepProfile], Row] | None = None,
        activations: Mapping[tuple[str, str], int] | None = None,
        stages: Mapping[str, int] | None = None,
        losses: Sequence[float] = (),
    ) -> Row:
        """Judge and save what each rank measured, and return the row.

        `absolute` budgets are held to beside those of `--budgets`; `times` are further entries of the row's time;
        `stages` are the formulas, in bytes, of what is live after each stage that the meter was told of; `losses` those
        of each step.
        """
        __tracebackhide__ = True
        session = self._session
        row = new_row(plan, session.scale, session.link_rate)
        seconds = step_seconds(ranks)
        self._replay(seconds)
        row["backend"] = ranks[0].backend
        if memory_budget is not None:
            row["memory"] = memory_entry(ranks, memory_budget)
        if ranks[0].timeline is not None:
            row["memory"] |= timeline_entry(ranks[0].timeline, activations or {})
        if ranks[0].memory.stages:
            row["memory"]["stages"] = stages_entry(ranks, stages or {})
        if losses:
            row["losses"] = list(losses)
        if work is not None:
            row["work"] = asdict(work) | rates(fmean(seconds))
            row["limit"] = self._limit(plan, work, fmean(seconds))
        if goals:
            row["limit"]["goals"] = limit_goals(row["limit"], goals, seconds)
        row["time"], ratio = time_entry(ranks, race, session.confidence)
        row["time"] |= times or {}
        row |= profile_entry(ranks, profiled)
        absolute = [*absolute, *session.budgets_for(self._item.nodeid)]
        tensors, peaks = (row["memory"].get(f"{name}_by_rank", []) for name in ("tensors", "peak"))
        held = budget.verdicts(tensors, peaks, seconds, ratio, race, memory_budget, absolute, session.confidence)
        verdicts = list(held)
        row["verdict"] = budget.combined([verdict for verdict, _ in verdicts])
        if self._benchmark.disabled:
            verdicts = [(verdict, why) for verdict, why in verdicts if verdict != budget.UNDECIDED]
        else:
            self._save(row, {"mean": fmean(seconds), "stddev": stdev(seconds) if len(seconds) > 1 else 0.0})
        complaints = {
            outcome: "; ".join(why for verdict, why in verdicts if verdict == outcome)
            for outcome in (budget.FAIL, budget.UNDECIDED)
        }
        if complaints[budget.FAIL]:
            pytest.fail(complaints[budget.FAIL], pytrace=False)
        if complaints[budget.UNDECIDED]:
            pytest.skip(f"undecided: {complaints[budget.UNDECIDED]}")
        return row

    def _limit(self, plan: Plan, work: Work, seconds: float) -> Row:
        """The row's limit where a step takes so long."""
        devices = plan.world_size if plan.device == "cuda" else 1
        return limit_entry(work, self._session.roofline(plan.case.dtype), devices, seconds)

    def _limits(self, race: Race | None) -> Limits | None:
        """What the rounds are to decide; None where pytest-benchmark is disabled."""
        ratios = (race.budget,) if race is not None and race.budget is not None else ()
        seconds = [own.seconds for own in self._session.budgets_for(self._item.nodeid) if own.seconds is not None]
        if self._benchmark.disabled or not (ratios or seconds):
            return None
        return Limits(self._session.confidence, ratios, tuple(seconds))

    def _peer(self, implementation: Implementation, race: Race | None) -> Implementation | None:
        """The implementation that it is raced against, if that is another one and runs here."""
        if race is None:
            return None
        peer = registry.family(implementation.family).implementations[race.peer]
        return (
            None
            if peer.target is implementation.target or peer.unavailable_reason(self._session.device, to_measure=True)
            else peer
        )

    def _rounds(self, own_rounds: Rounds | None, least: int) -> Rounds:
        """The test's own, `least` of them at least, or pytest-benchmark's options, those of the test's marker first."""
        marker = self._item.get_closest_marker("benchmark")
        own = marker.kwargs if marker else {}

        def option(name: str) -> Any:
            return own.get(name, self._session.config.getoption(f"benchmark_{name}"))

        if self._benchmark.disabled:
            return Rounds(minimum=1, maximum=1)
        if own_rounds is not None:
            return replace(own_rounds, minimum=max(least, own_rounds.minimum))
        cases = self._item.get_closest_marker("cases")
        published = cases.args[0].paper_rounds if cases and self._session.scale == "paper" else 0
        return Rounds(
            minimum=max(least, published, option("min_rounds")),
            max_seconds=float(option("max_time")),
            warmups=max(1, option("warmup_iterations")) if option("warmup") else 2,
            max_warmup_seconds=float(option("max_time")) if option("warmup") else math.inf,
            disable_gc=option("disable_gc"),
        )

    def _admit(self, plan: Plan, memory_budget: MemoryBudget) -> Plan:
        """The plan, without its peer where there is no room for both.

        Skips a case that would not fit by its own formula, with a row that says what it needs and what there is.
        """
        copies = 1 if plan.device == "cuda" else plan.world_size  # ranks on CPU share the RAM
        needed = memory_budget.formula * copies
        available = min(self._session.worlds.get(plan.world_size).run(available_bytes, plan.device))
        if needed > available:
            self._unmeasured(plan, memory_budget, budget.NOT_STARTED, needed=needed, available=available)
            pytest.skip(f"not started: needs {needed / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available")
        if plan.peer is None:
            return plan
        both = needed + _formula(plan.peer, plan.case) * copies
        if both <= available:
            return plan
        self._item.warn(
            pytest.PytestWarning(
                f"measured without its peer {plan.peer}: both need {both / MIB:,.0f} MiB of {available / MIB:,.0f} MiB"
            )
        )
        return replace(plan, peer=None)

    def _replay(self, seconds: list[float]) -> None:
        """Hand the measured times to pytest-benchmark, round by round, through the clock it reads."""
        clock, remaining = self._session.clock, iter(seconds)
        # Past the last round there is only what pytest-benchmark's own profiler asks for, and that takes no time.
        self._benchmark.pedantic(lambda: clock.advance(next(remaining, 0.0)), setup=clock.reset, rounds=len(seconds))

    def _unmeasured(self, plan: Plan, memory_budget: MemoryBudget, verdict: str, **memory: int) -> None:
        """Save a row without times."""
        self._benchmark.skipped = True  # or pytest-benchmark warns of a fixture that was not used
        row = new_row(plan, self._session.scale, self._session.link_rate)
        row["memory"] = {**asdict(memory_budget), "budget": memory_budget.bytes, **memory}
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
