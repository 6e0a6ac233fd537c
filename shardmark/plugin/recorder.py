"""Judge a measured case, save its row, and pass or fail its test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import pytest

from shardmark.api import registry
from shardmark.api.registry import Race
from shardmark.api.work import Work
from shardmark.meter.callers import Callers
from shardmark.meter.disturbances import WAITED, in_words
from shardmark.meter.over_budget import Held, excess_lines
from shardmark.meter.plan import IMPLEMENTATION, PEER, Identity, Measured, Plan
from shardmark.plugin.fresh import Fresh
from shardmark.plugin.grown import lines_of
from shardmark.ranks.worlds import Worlds
from shardmark.report.outcomes import LEFT_OPEN
from shardmark.rows.atomic_json import dumped
from shardmark.rows.case_times import CaseKey
from shardmark.rows.change import Line
from shardmark.rows.figures import main_figures
from shardmark.rows.fill import (
    counters_entry,
    gpus_entry,
    limit_entry,
    memory_entry,
    new_row,
    part_of,
    step_seconds,
    time_entry,
)
from shardmark.rows.observers import Observer
from shardmark.rows.pairs import NAMES, paired_with, pairs_entry, sums
from shardmark.rows.row import Limit, Row
from shardmark.rows.row import Work as WorkPart
from shardmark.verdict import budget
from shardmark.verdict.betting import FAIL, UNDECIDED
from shardmark.verdict.budget import MemoryBudget
from shardmark.verdict.slowdown import stalls

if TYPE_CHECKING:
    from shardmark.plugin.session import Session

Rates = Callable[[float], dict[str, float]]

STATS = ("median", "q1", "q3", "mean", "stddev", "rounds")
"""Statistics of pytest-benchmark that a row's entry has while the run goes on; the file has all."""

MARGIN = 1.1
"""A step that seems to compute this many times faster than the machine can has left work out."""


class Recorder:
    """Judges what the ranks measured for a test's case, and saves the row."""

    def __init__(self, session: Session, item: pytest.Item, benchmark: Any) -> None:
        self._session = session
        self._item = item
        self._benchmark = benchmark

    def _confidence(self, race: Race | None) -> float:
        """The confidence of each interval that decides a verdict of this test."""
        return self._session.confidence(self._item.nodeid, race)

    def record(
        self,
        identity: Identity,
        ranks: Sequence[Measured],
        *,
        work: Work | None = None,
        time: Race | None = None,
        memory: MemoryBudget | None = None,
        rates: Rates = lambda seconds: {},
        observe: Sequence[Observer] = (),
        again: Callable[[], Sequence[Sequence[Measured]]] = tuple,
        at_peak: Callable[[], list[Held]] = lambda: [],
        callers: Callable[[], Callers] = lambda: {},
        beside_ref: Callable[[Row], list[tuple[str, str]]] = lambda row: [],
        step: str | None = None,
    ) -> Row:
        """Judge and save what each rank measured, and return the row.

        `time` is the race that the ranks' laps hold, or that an earlier row timed; `again` times it in further
        processes; `at_peak` finds what was live at the peak, and is called once the row of a failed memory budget is
        saved, and `callers` the lines that operators come from, where there are more than before; `beside_ref` judges
        the row beside that of `--against-ref`. Rows of one `step`, the workload's name, have their times in common
        whatever their question (`shardmark.rows.case_times`).
        """
        __tracebackhide__ = True
        session = self._session
        row = new_row(replace(identity, backend=ranks[0].backend), session.scale, session.link_rate)
        key, peer = self._case_key(identity, step), None if time is None else time.peer
        as_measured, peer_seconds = (
            step_seconds(ranks, name) if name in ranks[0].laps else [] for name in (IMPLEMENTATION, PEER)
        )
        pace = session.times.pace(key, identity.implementation, as_measured, peer, peer_seconds)
        ranks = [rank.at_pace(pace) for rank in ranks]
        seconds = step_seconds(ranks)
        confidence = self._confidence(time)
        if memory is not None or ranks[0].memory.phases:  # metered, though it has no budget
            row["memory"] = memory_entry(ranks, memory)
        row["counters"] = counters_entry(ranks)
        if gpus := gpus_entry(ranks):
            row["gpus"] = gpus
        ratios = None if peer is None else session.times.ratios(key, identity.implementation, peer)
        row["time"], ratio = time_entry(ranks, time, confidence, ratios)
        row["time"]["pace"] = pace
        if work is not None:
            row["work"] = cast(WorkPart, {**part_of(WorkPart, work), **rates(median(seconds))})
        with session.ending.held():  # pytest-benchmark has its entry once they are replayed
            stats = self._replay(seconds)
        verdicts: list[tuple[str, str]] = []
        try:
            if work is not None:
                row["limit"] = self._limit(identity, work, median(seconds), pace)
            processes = again()
            if peer is not None:
                session.times.add(key, identity.implementation, peer, paired_with(PEER, processes))
            fresh, own = (
                {name: found for name in NAMES if (found := paired_with(name, each))} for each in (processes, [ranks])
            )
            if ratio is not None and peer is not None:
                fresh[PEER] = session.times.fresh(key, identity.implementation, peer)
                own[PEER] = [pairs] if (pairs := session.times.pairs(key, identity.implementation, peer)) else []
            compared = sums(fresh, {name: each[0] for name, each in own.items() if each}, confidence)
            row["time"]["pairs"] = {name: pairs_entry(each) for name, each in compared.items()}
            if said := stalls(as_measured, peer_seconds) if peer_seconds else "":
                row["time"]["stalls"] = said
            family = registry.FAMILIES.get(identity.family)
            raced = None if family is None else family.implementations.get(row["time"]["peer"] or "")
            if raced is not None and raced.called:
                row["time"]["peer_called"] = raced.called
            for observer in observe:
                observer.fill(row, ranks)
            absolute = session.budgets_for(self._item.nodeid)
            tensors, peaks = row["memory"].get("tensors_by_rank", []), row["memory"].get("peak_by_rank", [])
            waited = row["time"]["machine"].get(WAITED, 0.0) if identity.world_size > 1 else 0.0
            verdicts += budget.verdicts(tensors, peaks, as_measured, ratio, time, memory, absolute, confidence, waited)
            if "not_done" in row["limit"]:
                verdicts.append((FAIL, row["limit"]["not_done"]))
            if session.against is not None:
                verdicts += session.against.judge(self._benchmark.fullname, row)
            verdicts += beside_ref(row)
        except BaseException:  # the user's Ctrl-C, a deadline, ranks that died: what was measured stays
            row["verdict"] = budget.combined([verdict for verdict, _ in verdicts]) if verdicts else None
            if not self._benchmark.disabled:
                self._save(row, stats)
            raise
        self._conclude(row, stats, verdicts, observe, memory, at_peak, callers)
        return row

    def _conclude(
        self,
        row: Row,
        stats: dict[str, float] | None,
        verdicts: list[tuple[str, str]],
        observe: Sequence[Observer],
        memory: MemoryBudget | None,
        at_peak: Callable[[], list[Held]],
        callers: Callable[[], Callers] = lambda: {},
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
                with suppress(Exception):  # the verdict and the formula's entries are shown without it
                    found = at_peak()
                lines = list(excess_lines(memory.formula, found))
            worse = [text.change for verdict, text in verdicts if verdict == FAIL and isinstance(text, Line)]
            lines += lines_of(worse, (lambda: []) if lines else at_peak, callers)
            pytest.fail("\n".join([complaints[FAIL], "", *lines]).rstrip(), pytrace=False)
        if complaints[UNDECIDED] and session.undecided_fails:
            pytest.fail(f"undecided: {complaints[UNDECIDED]}", pytrace=False)
        if complaints[UNDECIDED]:
            machine = in_words(row["time"]["machine"])
            self._item.stash[LEFT_OPEN] = "; ".join(each for each in (complaints[UNDECIDED], machine) if each)

    def _in_fresh_processes(
        self, plan: Plan, ranks: Sequence[Measured], race: Race | None, key: CaseKey, deadline: float
    ) -> list[list[Measured]]:
        """Time the case in fresh processes, where a comparison with an earlier run, or a new baseline, needs them."""
        against, worlds, test_id = self._session.against, self._session.worlds, self._benchmark.fullname
        if against is None or self._benchmark.disabled or not isinstance(worlds, Worlds):
            return []
        fresh = Fresh(plan, self._confidence(race), deadline, median(step_seconds(ranks)))
        try:
            if against.new is not None:
                fresh.add_process(worlds)
                self._session.baseline_rows.rows[test_id] = fresh, key, None if race is None else race.peer
            elif gate := against.gate(test_id, None if plan.peer is None else plan.peer.name):
                fresh.decide(gate, worlds)
        except Exception as error:  # the row is kept, with the pairs that there are
            line = next(iter(str(error).splitlines()), type(error).__name__)
            self._item.warn(pytest.PytestWarning(f"timed in {len(fresh.processes)} fresh processes: {line}"))
        return fresh.processes[:]

    def _case_key(self, identity: Identity, step: str | None) -> CaseKey:
        """Where the times of the case are kept; `step` names the workload, by default it is the test's question."""
        case = dumped(new_row(identity, self._session.scale, None)["case"])
        return CaseKey(step or self._benchmark.group, identity.family, case, identity.world_size)

    def _limit(self, identity: Identity, work: Work, seconds: float, pace: float) -> Limit:
        """The row's "limit" for a step of that many seconds, which took `pace` times as long when it was measured."""
        devices = identity.world_size if identity.device == "cuda" else 1
        dtype = getattr(identity.case, "compute_dtype", identity.case.dtype)
        limit = limit_entry(work, self._session.roofline(dtype), devices, seconds)
        needed = work.flops / (devices * seconds * pace) if seconds else 0.0  # FLOP/s of each device
        beyond = needed > MARGIN * limit["peak_flops_per_second"]
        most = self._session.most_flops_per_second(dtype) if beyond else math.inf
        if needed > MARGIN * most:
            limit["not_done"] = f"{needed / most:.0%} of what this machine can compute: the work was not done"
        return limit

    def _replay(self, seconds: list[float]) -> dict[str, float]:
        """Hand the times to pytest-benchmark, round by round, through the clock it reads; return its statistics."""
        clock, remaining = self._session.clock, iter(seconds)
        # Past the last round there is only what pytest-benchmark's own profiler asks for, and that takes no time.
        self._benchmark.pedantic(lambda: clock.advance(next(remaining, 0.0)), setup=clock.reset, rounds=len(seconds))
        found = {} if self._benchmark.disabled else self._benchmark.stats.stats
        return {name: getattr(found, name) for name in STATS if found}

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
