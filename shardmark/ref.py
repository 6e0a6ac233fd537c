"""`--against-ref REF`: each case in this version and in that one, in pairs of rounds of one run.

    pytest perf -k fsdp --against-ref main

Each version has ranks of its own (`shardmark.checkout`), which take turns, so that it does not matter what the machine
does meanwhile: what is judged is the ratio of one version's time to the other's. Memory and counters are compared
exactly. A case that the other version does not have, or that fails there, is not compared; the last lines say why.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest

from shardmark.against import Change, OldRow, compared
from shardmark.budget import tolerated
from shardmark.checkout import Checkout
from shardmark.comparison import Comparison
from shardmark.evidence import Interval, decided, fewest_rounds, interval, paired_ratios
from shardmark.passes import measure, rounds_while, shuffled, timed_step, warmed_up
from shardmark.plan import Measured, Plan, Rounds, Workload
from shardmark.report.layout import printable
from shardmark.rows import Row, counters_entry, memory_entry
from shardmark.world import RankError, World, Worlds

HERE, THERE = "here", "there"

LONGEST_REASON = 200
"""Characters of why a case fails in the other version."""

_live: list[tuple[Plan, Workload]] = []
"""On a rank: what it is timing."""


class Ref:
    """The other version and its worlds; the plugin, registered where `--against-ref` names it."""

    def __init__(self, checkout: Checkout, device: str) -> None:
        self.checkout = checkout
        self.name = printable(checkout.ref)
        self.worlds = Worlds(device, checkout=checkout)
        self._comparison = Comparison()

    def judge(
        self, test_id: str, plan: Plan, row: Row, world: World, confidence: float, deadline: float
    ) -> list[tuple[str, str]]:
        """The verdicts on a row beside that version's, and what to say of them; the ratio goes to the row's "ref"."""
        assert plan.memory is not None
        row["ref"] = {"name": self.name, "commit": self.checkout.commit}
        try:
            measured = self._measured(plan, deadline)
            ratio = self._race(plan, world, confidence)
        except Exception as error:
            if not world.alive:
                raise
            cause = error.exception or error if isinstance(error, RankError) else error
            line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)[:LONGEST_REASON]
            missing = dict.fromkeys(("time", "memory", "counters"), f"that {self.name} fails on ({line})")
            return self._comparison.add(test_id, {**missing})
        row["ref"] |= {"ratio": ratio.center, "interval": ratio.ends}
        old = OldRow.of(
            row | {"time": {}, "memory": memory_entry(measured, plan.memory), "counters": counters_entry(measured)}
        )
        text = f"{ratio.center:.3f}x the time that it takes in {self.name}, {ratio}"
        time = Change(ratio.verdict(tolerated(1.0)), text, better=tolerated(ratio.high) < 1)
        return self._comparison.add(test_id, {**compared(old, row, None, True, self.name), "time": [time]})

    def pytest_report_header(self) -> str:
        """The other version."""
        return f"against: {self.name}, commit {self.checkout.commit[:10]}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """What was compared, below all else."""
        yield
        terminalreporter.section(f"against {self.name}", sep="-")
        self._comparison.write(terminalreporter, iter(()))

    def close(self) -> None:
        """End its worlds and remove its files."""
        self.worlds.close()
        self.checkout.remove()

    def _measured(self, plan: Plan, deadline: float) -> list[Measured]:
        """What each rank of that version measures of the case alone: memory and counters."""
        alone = replace(plan, peer=None, limits=None, observers=(), trace=None, rounds=Rounds(minimum=1, maximum=1))
        return self.worlds.get(plan.world_size).run(measure, alone, deadline=deadline)

    def _race(self, plan: Plan, world: World, confidence: float) -> Interval:
        """The ratio of this version's time to that one's, from rounds in which they take turns."""
        worlds = {HERE: world, THERE: self.worlds.get(plan.world_size)}
        seconds: dict[str, list[float]] = {name: [] for name in worlds}

        def undecided() -> bool:
            return not decided(paired_ratios(seconds[HERE], seconds[THERE]), tolerated(1.0), confidence)

        try:
            warm = [max(each.run(_begin, plan)) for each in worlds.values()]
            first = max(fewest_rounds(confidence), plan.rounds.count(max(warm)))
            for _ in rounds_while(undecided, first, plan.rounds):
                for name in shuffled(list(worlds)):
                    seconds[name].append(max(worlds[name].run(_step)))
        finally:
            for each in worlds.values():
                if each.alive:
                    each.run(_end)
        return interval(paired_ratios(seconds[HERE], seconds[THERE]), confidence)


def _begin(plan: Plan) -> float:
    """Make the workload on this rank and warm it up; what its last step took."""
    _live[:] = [(plan, warmed_up(plan))]
    return _step()


def _step() -> float:
    ((plan, workload),) = _live
    return timed_step(plan, workload, workload.step).seconds


def _end() -> None:
    _live.clear()
