"""The `measure` fixture: admit a case, measure it on a world, judge it by its budgets, save its row."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from shardmark import budget, registry
from shardmark.budget import MEMORY_SLACK, MIB, Limits, MemoryBudget
from shardmark.disturbances import in_words
from shardmark.evidence import FAIL, SHOWN_CONFIDENCE, UNDECIDED, fewest_rounds
from shardmark.excess import Held, excess_lines
from shardmark.grid import Work
from shardmark.memory import available_bytes, is_out_of_memory
from shardmark.observers import Observer, Profile
from shardmark.passes import blocks_at_peak, measure
from shardmark.plan import Identity, Measured, Plan, Rounds, Workload
from shardmark.registry import Implementation, Race
from shardmark.report import undecided
from shardmark.rows import (
    Row,
    budget_entry,
    counters_entry,
    limit_entry,
    main_figures,
    memory_entry,
    new_row,
    step_seconds,
    time_entry,
)
from shardmark.world import RankError, World

if TYPE_CHECKING:
    from shardmark.session import Session

T = TypeVar("T")
Rates = Callable[[float], dict[str, float]]

MARGIN = 1.1
"""Times the fastest that this machine was seen to compute: what seems to compute more has left work out."""
CASE_DEADLINE = 1800.0
"""Seconds for all rounds of one case: long, as paper-scale cases are, and short of a night."""


class Measure:
    """Measure one case and hold it to its budgets; a test calls it once.

        measure(TrainingStep, implementation, case, work=work(case, world.size), world_size=world.size)

    `workload` is a module-level class (`shardmark.plan.Workload`); `work` is what one step does on all ranks; `rates`
    turns the mean step time into further figures of the row's work. The memory budget is `slack` times the
    implementation's own formula; of one that has none, times what a simulation predicts. `time` is the race; without
    it, the one that the implementation is registered with. A case whose `time` has a goal is not started without room
    for the peer too. `rounds` are by default those of pytest-benchmark's options; more are added while a verdict is
    undecided. `observe` is what else is to be seen (`shardmark.observers`). The row is saved whatever the verdict. Over
    budget, the test fails; where the rounds leave a time budget undecided, so is the test; where the case would not
    fit, it is skipped.

    A test that measures by its own means saves its row with `record`.
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
        time: Race | None = None,
        rounds: Rounds | None = None,
        rates: Rates = lambda seconds: {},
        observe: Sequence[Observer] = (),
    ) -> Row:
        """Returns the row. Raises TypeError where the workload lacks what an observer needs."""
        __tracebackhide__ = True
        session = self._session
        for observer in observe:
            observer.check(workload)
        trace = session.trace.stem(self._item.nodeid, f"{case}-{implementation}") if session.trace else None
        if trace is not None and not any(isinstance(observer, Profile) for observer in observe):
            observe = [*observe, Profile()]
        race = time or implementation.time
        if race is not None and not race.applies(case, session.device):
            race = Race(race.peer)
        least = fewest_rounds(SHOWN_CONFIDENCE) if race is not None and race.goal is not None else 1
        if race is not None and session.gate is not None:
            least = fewest_rounds(session.confidence)
        plan = Plan(
            workload,
            implementation,
            self._peer(implementation, race),
            case,
            session.device,
            world_size,
            self._rounds(rounds, max([least, *(observer.min_rounds for observer in observe)])),
            tensors_before=None if session.gate is None else session.gate.tensors(self._benchmark.fullname),
            limits=self._limits(race),
            observers=tuple(type(observer) for observer in observe),
            coin=secrets.randbits(64),
            trace=trace,
        )

        if session.simulated:
            known = implementation.memory is not None  # a prediction is no budget for itself
            memory = memory_budget(implementation, case, session.device, slack) if known else None
            return self._predict(plan, work, memory, observe)
        memory = self._budget(plan, slack)
        identity = plan.identity
        goal = None if time is None else time.goal
        plan = self._with_room_for_peer(replace(plan, memory=memory), self._admit(identity, memory), goal)
        ranks = self._unless_out_of_memory(
            identity, memory, lambda: session.worlds.get(world_size).run(measure, plan, deadline=CASE_DEADLINE)
        )

        def at_peak() -> list[Held]:
            held = session.worlds.get(world_size).run(blocks_at_peak, plan, deadline=CASE_DEADLINE)
            return max(held, key=lambda rank: sum(each.nbytes for each in rank))

        def beside_ref(row: Row) -> list[tuple[str, str]]:
            if session.ref is None or self._benchmark.disabled:
                return []
            world = session.worlds.get(world_size)
            assert isinstance(world, World)
            return session.ref.judge(self._benchmark.fullname, plan, row, world, session.confidence, CASE_DEADLINE)

        return self.record(
            identity,
            ranks,
            work=work,
            time=race,
            memory=memory,
            rates=rates,
            observe=observe,
            at_peak=at_peak,
            beside_ref=beside_ref,
        )

    def attempt(self, identity: Identity, memory: MemoryBudget | None, run: Callable[[], list[T]]) -> list[T]:
        """What `run` returns, if the case fits and memory does not run out; else its row says so, and the test ends."""
        __tracebackhide__ = True
        if self._session.simulated:
            raise registry.Unsupported("it measures by its own means, and --simulate predicts memory alone")
        self._admit(identity, memory)
        return self._unless_out_of_memory(identity, memory, run)

    def record(
        self,
        identity: Identity,
        ranks: list[Measured],
        *,
        work: Work | None = None,
        time: Race | None = None,
        memory: MemoryBudget | None = None,
        rates: Rates = lambda seconds: {},
        observe: Sequence[Observer] = (),
        at_peak: Callable[[], list[Held]] = lambda: [],
        beside_ref: Callable[[Row], list[tuple[str, str]]] = lambda row: [],
    ) -> Row:
        """Judge and save what each rank measured, and return the row.

        `time` is the race that the ranks' laps hold; `at_peak` finds what was live at the peak, and is called once the
        row of a failed memory budget is saved; `beside_ref` judges the row beside that of `--against-ref`.
        """
        __tracebackhide__ = True
        session = self._session
        row = new_row(replace(identity, backend=ranks[0].backend), session.scale, session.link_rate)
        seconds = step_seconds(ranks)
        self._replay(seconds)
        if memory is not None or ranks[0].memory.phases:  # metered, though it has no budget
            row["memory"] = memory_entry(ranks, memory)
        if work is not None:
            row["work"] = asdict(work) | rates(fmean(seconds))
            row["limit"] = self._limit(identity, work, fmean(seconds))
        row["counters"] = counters_entry(ranks)
        row["time"], ratio = time_entry(ranks, time, session.confidence)
        for observer in observe:
            observer.fill(row, ranks)
        absolute = session.budgets_for(self._item.nodeid)
        tensors, peaks = (row["memory"].get(f"{name}_by_rank", []) for name in ("tensors", "peak"))
        verdicts = list(budget.verdicts(tensors, peaks, seconds, ratio, time, memory, absolute, session.confidence))
        if "not_done" in row["limit"]:
            verdicts.append((FAIL, row["limit"]["not_done"]))
        if session.gate is not None:
            verdicts += session.gate.judge(self._benchmark.fullname, row, ratio)
        spread = stdev(seconds) if len(seconds) > 1 else 0.0
        stats = {"mean": fmean(seconds), "stddev": spread, "rounds": len(seconds)}
        try:
            verdicts += beside_ref(row)
        except BaseException:  # of this version, or the user's Ctrl-C: what was measured stays
            row["verdict"] = budget.combined([verdict for verdict, _ in verdicts])
            self._save(row, stats)
            raise
        self._conclude(row, stats, verdicts, observe, memory, at_peak)
        return row

    def _predict(self, plan: Plan, work: Work, memory: MemoryBudget | None, observe: Sequence[Observer]) -> Row:
        """Judge and save what the case would take on the first rank, and return the row: it has no times."""
        __tracebackhide__ = True
        # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
        from shardmark.simulation.predict import predict, predicted_at_peak

        session = self._session
        observe = [observer for observer in observe if observer.of_memory]
        plan = replace(plan, observers=tuple(type(observer) for observer in observe))
        ranks = [predict(plan)]
        row = new_row(replace(plan.identity, backend=ranks[0].backend), session.scale, None)
        row |= {"simulated": True, "memory": memory_entry(ranks, memory), "work": asdict(work), "time": {"ratio": None}}
        for observer in observe:
            observer.fill(row, ranks)
        absolute = [replace(own, seconds=None) for own in session.budgets_for(self._item.nodeid)]
        tensors, peaks = row["memory"]["tensors_by_rank"], row["memory"]["peak_by_rank"]
        verdicts = list(budget.verdicts(tensors, peaks, [], None, None, memory, absolute, session.confidence))
        self._conclude(row, None, verdicts, observe, memory, lambda: predicted_at_peak(plan))
        return row

    def _conclude(
        self,
        row: Row,
        stats: dict[str, float] | None,
        verdicts: list[tuple[str, str]],
        observe: Sequence[Observer],
        memory: MemoryBudget | None,
        at_peak: Callable[[], list[Held]],
    ) -> None:
        """Save the row with its verdict; a budget that is not met fails the test."""
        __tracebackhide__ = True
        session = self._session
        row["verdict"] = budget.combined([verdict for verdict, _ in verdicts])
        complaints = {
            outcome: "; ".join(why for verdict, why in verdicts if verdict == outcome) for outcome in (FAIL, UNDECIDED)
        }
        row["why"] = complaints[FAIL] or complaints[UNDECIDED] or None
        if self._benchmark.disabled:
            complaints[UNDECIDED] = ""
        else:
            session.questions.observe(self._benchmark.group, observe)
            self._save(row, stats)
        if complaints[FAIL]:
            lines: list[str] = []
            if memory is not None and memory.verdict(max(row["memory"].get("tensors_by_rank", []), default=0)) == FAIL:
                found: list[Held] = []
                with suppress(Exception):  # the verdict, and what the formula has, stand without it
                    found = at_peak()
                lines = list(excess_lines(memory.formula, found))
            pytest.fail("\n".join([complaints[FAIL], "", *lines]).rstrip(), pytrace=False)
        if complaints[UNDECIDED]:
            machine = in_words(row["time"]["machine"])
            self._item.stash[undecided.WHY] = "; ".join(each for each in (complaints[UNDECIDED], machine) if each)

    def _limit(self, identity: Identity, work: Work, seconds: float) -> Row:
        """The row's "limit", of a step that takes so many seconds."""
        devices = identity.world_size if identity.device == "cuda" else 1
        dtype = identity.case.dtype
        limit = limit_entry(work, self._session.roofline(dtype), devices, seconds)
        needed = work.flops / (devices * seconds) if seconds else 0.0  # FLOP/s of each device
        beyond = needed > MARGIN * limit["peak_flops_per_second"]
        most = self._session.most_flops_per_second(dtype) if beyond else math.inf
        if needed > MARGIN * most:
            limit["not_done"] = f"{needed / most:.0%} of what this machine can compute: the work was not done"
        return limit

    def _limits(self, race: Race | None) -> Limits | None:
        """What the rounds are to decide; None where pytest-benchmark is disabled."""
        ratios: tuple[float, ...] = (race.budget,) if race is not None and race.budget is not None else ()
        if race is not None and self._session.gate is not None:
            ratios += self._session.gate.limits(self._benchmark.fullname, race.peer)
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
        """The test's own, or by pytest-benchmark's options (a test's marker goes first); at least `least`."""
        marker = self._item.get_closest_marker("benchmark")
        own = marker.kwargs if marker else {}

        def option(name: str) -> Any:
            return own.get(name, self._session.config.getoption(f"benchmark_{name}"))

        if self._benchmark.disabled:
            return Rounds(minimum=1, maximum=1)
        if own_rounds is not None:
            return replace(own_rounds, minimum=max(least, own_rounds.minimum))
        cases = self._item.get_closest_marker("cases")
        published = cases.args[0].full_rounds if cases and self._session.scale == "full" else 0
        return Rounds(
            minimum=max(least, published, option("min_rounds")),
            max_seconds=float(option("max_time")),
            warmups=max(1, option("warmup_iterations")) if option("warmup") else 2,
            max_warmup_seconds=float(option("max_time")) if option("warmup") else math.inf,
            disable_gc=option("disable_gc"),
        )

    def _budget(self, plan: Plan, slack: float = 1.0) -> MemoryBudget | None:
        """By the implementation's own formula, else by a prediction; None where neither is to be had."""
        if plan.implementation.memory is not None:
            return memory_budget(plan.implementation, plan.case, plan.device, slack)
        tensors = self._session.predictions.tensors(plan)
        workspace = plan.implementation.workspace(plan.case, plan.device)
        return None if tensors is None else MemoryBudget(tensors, slack, workspace, predicted=True)

    def _admit(self, identity: Identity, memory: MemoryBudget | None) -> int:
        """Bytes available for the case; one that would not fit is skipped, with a row that says what it needs."""
        needed = 0 if memory is None else memory.needed * _copies(identity)
        available = min(self._session.worlds.get(identity.world_size).run(available_bytes, identity.device))
        if needed > available:
            self._not_started(identity, memory, needed, available)
        return available

    def _not_started(self, identity: Identity, memory: MemoryBudget | None, needed: int, available: int) -> NoReturn:
        why = f"needs {needed / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available"
        self._unmeasured(identity, memory, budget.NOT_STARTED, why, needed=needed, available=available)
        pytest.skip(f"{budget.NOT_STARTED}: {why}")

    def _with_room_for_peer(self, plan: Plan, available: int, goal: float | None) -> Plan:
        """The plan, without its peer where there is no room for both; with a goal, it is not started then."""
        if plan.peer is None:
            return plan
        own, theirs = plan.memory, self._budget(replace(plan, implementation=plan.peer))
        if own is None or theirs is None:
            return plan
        workspace = max(own.expected_workspace, theirs.expected_workspace)  # they take turns
        both = (own.formula + theirs.formula + workspace) * _copies(plan.identity)
        if both <= available:
            return plan
        if goal is not None:
            self._not_started(plan.identity, own, both, available)
        self._item.warn(
            pytest.PytestWarning(
                f"measured without its peer {plan.peer}: both need {both / MIB:,.0f} MiB of {available / MIB:,.0f} MiB"
            )
        )
        return replace(plan, peer=None)

    def _unless_out_of_memory(
        self, identity: Identity, memory: MemoryBudget | None, run: Callable[[], list[T]]
    ) -> list[T]:
        __tracebackhide__ = True
        try:
            return run()
        except Exception as error:
            cause = error.exception if isinstance(error, RankError) else error
            if not is_out_of_memory(cause):
                raise
            why = f"on rank {getattr(error, 'rank', 0)}: {str(cause) or 'MemoryError'}"
            self._unmeasured(identity, memory, budget.OUT_OF_MEMORY, why)
            pytest.fail(f"{budget.OUT_OF_MEMORY} {why}", pytrace=False)

    def _replay(self, seconds: list[float]) -> None:
        """Hand the measured times to pytest-benchmark, round by round, through the clock it reads."""
        clock, remaining = self._session.clock, iter(seconds)
        # Past the last round there is only what pytest-benchmark's own profiler asks for, and that takes no time.
        self._benchmark.pedantic(lambda: clock.advance(next(remaining, 0.0)), setup=clock.reset, rounds=len(seconds))

    def _unmeasured(
        self, identity: Identity, memory: MemoryBudget | None, verdict: str, why: str, **found: int
    ) -> None:
        """Save a row without times."""
        self._benchmark.skipped = True  # or pytest-benchmark warns of a fixture that was not used
        row = new_row(identity, self._session.scale, self._session.link_rate)
        row["memory"] = {**({} if memory is None else budget_entry(memory)), **found}
        row |= {"verdict": verdict, "why": why}
        self._save(row, None)

    def _save(self, row: Row, stats: dict[str, float] | None) -> None:
        entry = {
            "group": self._benchmark.group,
            "name": self._benchmark.name,
            "fullname": self._benchmark.fullname,
            "stats": stats,
            "extra_info": row,
        }
        self._item.user_properties += main_figures(entry)
        if stats is not None:
            self._benchmark.extra_info.update(row)
        self._session.rows.add(entry)


def memory_budget(implementation: Implementation, case: Any, device: str, slack: float = MEMORY_SLACK) -> MemoryBudget:
    """The implementation's peak by its own formula, and the slack that it is given."""
    return MemoryBudget(implementation.peak(case, device), slack, implementation.workspace(case, device))


def _copies(identity: Identity) -> int:
    """How many ranks share the memory that is available: on CPU, all."""
    return 1 if identity.device == "cuda" else identity.world_size
