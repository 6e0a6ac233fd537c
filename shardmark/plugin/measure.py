"""The `measure` fixture: admit a case and measure it on a world; `shardmark.plugin.recorder` makes the row."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from shardmark.api import registry
from shardmark.api.registry import Implementation, Race
from shardmark.api.work import Work
from shardmark.api.workload import Workload
from shardmark.meter.at_peak import blocks_at_peak
from shardmark.meter.callers import Callers, callers
from shardmark.meter.measure_case import NEAR, measure
from shardmark.meter.memory import Memory
from shardmark.meter.over_budget import Held
from shardmark.meter.plan import Identity, Measured, Plan, Rounds
from shardmark.plugin.admission import Admission, copies
from shardmark.plugin.recorder import Rates
from shardmark.predict.entry import predicted_time_entry
from shardmark.predict.worlds import SimulatedWorlds
from shardmark.ranks.deadline import within
from shardmark.ranks.world import World
from shardmark.rows.fill import memory_entry, new_row, part_of
from shardmark.rows.observers import Observer, Profile
from shardmark.rows.row import Memory as MemoryPart
from shardmark.rows.row import Row
from shardmark.rows.row import Work as WorkPart
from shardmark.verdict import budget
from shardmark.verdict.betting import SHOWN_CONFIDENCE, fewest_rounds
from shardmark.verdict.budget import MEMORY_SLACK, MIB, Limits, MemoryBudget

T = TypeVar("T")

ROOMY = 16
"""A peer without a formula is assumed to fit beside the case if this many times the case's own bytes are available."""


class Measure(Admission):
    """Measure one case and hold it to its budgets; a test calls it once.

        measure(TrainingStep, implementation, case, work=work(case, world.size), world_size=world.size)

    `workload` is a module-level class (`shardmark.api.Workload`); `work` is what one step does on all ranks; `rates`
    turns the mean step time into further figures of the row's work. The memory budget is `slack` times the
    implementation's own formula or, without a formula, times the simulated peak. `time` is the race, by default the
    one that the implementation is registered with. A case whose `time` has a goal starts only if its peer fits too.
    `rounds` are by default those of pytest-benchmark's options; more are added while a verdict is undecided. `observe`
    lists observers (`shardmark.rows.observers`). The row is saved whatever the verdict. The test fails over budget, is
    undecided where the rounds leave a time budget undecided, and is skipped where the case would not fit.

    A test that measures by its own means saves its row with `record`.
    """

    _unbudgeted: str | None = None
    """Why the case has no memory budget, where a prediction failed."""

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
        if race is not None and (session.model is not None or not race.applies(case, session.device)):
            race = Race(race.peer)
        has_interval = race is not None and (rounds is None or race.goal is not None)  # a test's own rounds are kept to
        least = fewest_rounds(SHOWN_CONFIDENCE) if has_interval else 1
        peer, step = self._peer(implementation, race), f"{workload.__module__}.{workload.__qualname__}"
        family, name = implementation.family, implementation.name
        identity = Identity(family, name, case, session.device, world_size, called=implementation.called)
        asked = peer and session.times.ratios(self._case_key(identity, step), implementation.name, peer.name)
        plan = Plan(
            workload,
            implementation,
            None if asked else peer,
            case,
            session.device,
            world_size,
            self._rounds(rounds, max([least, *(observer.min_rounds for observer in observe)])),
            tensors_before=None if session.against is None else session.against.tensors(self._benchmark.fullname),
            limits=self._limits(race),
            observers=tuple(type(observer) for observer in observe),
            coin=secrets.randbits(64),
            rates=bool(rates(1.0)),
            load=not (session.simulated or self._benchmark.disabled),
            trace=trace,
        )

        if session.simulated:
            with within(self.deadline):
                return self._predict(plan, work, slack, observe)
        memory, identity = self._budget(plan, slack), plan.identity
        plan = replace(plan, memory=memory)
        goal = None if time is None else time.goal
        plan = self._with_room_for_peer(plan, self._admit(identity, memory), goal)
        ranks = self._unless_out_of_memory(
            identity, memory, lambda: session.worlds.get(world_size).run(measure, plan, deadline=self.deadline)
        )
        if self._unbudgeted:  # a case that the implementation refuses has been skipped
            self._item.warn(pytest.PytestWarning(self._unbudgeted))

        def again() -> list[list[Measured]]:
            return self._in_fresh_processes(plan, ranks, race, self._case_key(identity, step), self.deadline)

        def at_peak() -> list[Held]:
            held = session.worlds.get(world_size).run(blocks_at_peak, plan, deadline=self.deadline)
            return max(held, key=lambda rank: sum(each.nbytes for each in rank))

        def most_callers() -> Callers:
            found = session.worlds.get(world_size).run(callers, plan, deadline=self.deadline)
            return max(found, key=lambda rank: sum(sum(lines.values()) for lines in rank.values()))

        def beside_ref(row: Row) -> list[tuple[str, str]]:
            if session.against_ref is None or self._benchmark.disabled:
                return []
            world, confidence = session.worlds.get(world_size), self._confidence(race)
            assert isinstance(world, World)
            return session.against_ref.judge(self._benchmark.fullname, plan, row, world, confidence, self.deadline)

        return self.record(
            identity,
            ranks,
            work=work,
            time=race,
            memory=memory,
            rates=rates,
            observe=observe,
            again=again,
            at_peak=at_peak,
            callers=most_callers,
            beside_ref=beside_ref,
            step=step,
        )

    @property
    def deadline(self) -> float:
        """Seconds for one call on the ranks, or one prediction here."""
        return self._session.deadlines.measured

    def _predict(self, plan: Plan, work: Work, slack: float, observe: Sequence[Observer]) -> Row:
        """Predict the case on the first rank; judge its memory and save its row. Predicted times are not judged. Where
        ranks are not alike, memory is predicted on each, and no time, as they wait for one another."""
        __tracebackhide__ = True
        # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
        from shardmark.predict.simulation.chrome_trace import write_trace
        from shardmark.predict.simulation.communicator import communicator_bytes, room
        from shardmark.predict.simulation.predict import predict, predicted_at_peak, predicted_peer
        from shardmark.predict.simulation.within import within

        session = self._session
        assert session.simulated is not None
        on = session.simulated.hardware
        observe = [observer for observer in observe if observer.of_memory]
        plan = replace(plan, observers=tuple(type(observer) for observer in observe))
        alike = registry.ranks_alike(plan.implementation, plan.case)
        ranks = [predict(plan, rank, on) for rank in range(1 if alike else plan.world_size)]
        memory = self._budget(plan, slack, [rank.memory for rank in ranks])
        row = new_row(replace(plan.identity, device=on.device, backend=ranks[0].backend), session.scale, None)
        of_cuda: MemoryPart = {}
        if on.device == "cuda":
            size = plan.world_size
            of_cuda = {"communicator": communicator_bytes(on, size), "available": room(on, size)}
        row |= {
            "simulated": True,
            "hardware": on.name,
            "memory": {**memory_entry(ranks, memory), **of_cuda},
            "work": part_of(WorkPart, work),
            "time": {"ratio": None},
        }
        stats = None
        assert isinstance(session.worlds, SimulatedWorlds)
        here = session.worlds.machine
        step = ranks[0].steps.get(on.name) if here is None else here.step(plan)
        if alike and step is not None and step.seconds:  # a test may have no operators
            theirs = predicted_peer(plan, on) if here is None else here.peer(plan)
            known = within(step, on) if here is None and not on.measured else None  # of times by data sheets
            row["time"] = predicted_time_entry(step, plan.peer, theirs, known)
            if plan.trace is not None:
                row["trace"] = [write_trace(step, plan.trace.with_name(f"{plan.trace.name}.json")).name]
            stats = self._replay([step.seconds])
        for observer in observe:
            observer.fill(row, ranks)
        absolute = [replace(own, seconds=None) for own in session.budgets_for(self._item.nodeid)]
        tensors, peaks = row["memory"]["tensors_by_rank"], row["memory"]["peak_by_rank"]
        verdicts = list(budget.verdicts(tensors, peaks, [], None, None, memory, absolute, self._confidence(None)))
        self._conclude(row, stats, verdicts, observe, memory, lambda: predicted_at_peak(plan, on))
        return row

    def _budget(self, plan: Plan, slack: float, predicted: Sequence[Memory] = ()) -> MemoryBudget | None:
        """The budget by the implementation's own formula, else by a prediction; None where there is neither."""
        session = self._session
        if session.model is None and plan.implementation.memory is not None:
            with suppress(registry.NoFormula):
                return memory_budget(plan.implementation, plan.case, session.hardware.device, slack)
        if session.model is None and session.simulated:
            return None  # a prediction is no budget for itself; of a model it is, for the steps to come
        from shardmark.predict.memory_budget import predicted_budget  # as above

        if session.model is not None and session.device == "cpu":
            # Predicted to the byte, except for what a backend's thread may release late.
            slack = 1.0 if session.simulated or plan.world_size == 1 else NEAR
        try:
            with within(self.deadline):  # the step runs here, and not on a rank
                if session.model is None:
                    return predicted_budget(
                        plan,
                        session.hardware,
                        slack,
                        every_rank=not registry.ranks_alike(plan.implementation, plan.case),
                    )
                return predicted_budget(plan, session.hardware, slack, predicted)
        except Exception as error:
            if session.simulated and not isinstance(error, registry.Unsupported):
                raise  # a real run goes on without
            self._unbudgeted = f"{plan.implementation} has no memory budget: {error}"
            return None

    def _limits(self, race: Race | None) -> Limits | None:
        """The limits that the rounds must decide; None where pytest-benchmark is disabled."""
        ratios: tuple[float, ...] = (race.budget,) if race is not None and race.budget is not None else ()
        seconds = [own.seconds for own in self._session.budgets_for(self._item.nodeid) if own.seconds is not None]
        if self._benchmark.disabled or not (ratios or seconds):
            return None
        return Limits(self._confidence(race), ratios, tuple(seconds))

    def _peer(self, implementation: Implementation, race: Race | None) -> Implementation | None:
        """The implementation of the race, if it is another one and runs here."""
        if race is None:
            return None
        peer = registry.family(implementation.family).implementations[race.peer]
        return (
            None
            if peer.target is implementation.target or peer.unavailable_reason(self._session.device, to_measure=True)
            else peer
        )

    def _rounds(self, own_rounds: Rounds | None, least: int) -> Rounds:
        """The test's own rounds, else those of pytest-benchmark's options (a test's marker goes first); at least
        `least`."""
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

    def _with_room_for_peer(self, plan: Plan, available: int, goal: float | None) -> Plan:
        """The plan, without its peer where both do not fit; with a goal, the case is not started then."""
        own = plan.memory
        if plan.peer is None or own is None:
            return plan
        if plan.peer.memory is None and ROOMY * own.needed * copies(plan.identity) <= available:
            return plan  # to simulate a library's step takes seconds
        other = self._budget(replace(plan, implementation=plan.peer), slack=1)
        if other is None:
            return plan
        workspace = max(own.expected_workspace, other.expected_workspace)  # they take turns
        both = (own.formula + other.formula + workspace) * copies(plan.identity)
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


def memory_budget(implementation: Implementation, case: Any, device: str, slack: float = MEMORY_SLACK) -> MemoryBudget:
    """The implementation's peak by its own formula, and the slack that it is given."""
    return MemoryBudget(
        implementation.peak(case, device),
        slack,
        implementation.workspace(case, device),
        alike=registry.ranks_alike(implementation, case),
    )
