"""`--against-ref REF`: each case in this version and in that one, in pairs of rounds of one run.

    pytest perf -k fsdp --against-ref main

Each version has ranks of its own (`shardmark.checkout`), which take turns, so that it does not matter what the machine
does meanwhile: what is judged is the ratio of one version's time to the other's. Memory and counters are compared
exactly. A case that the other version does not have, or that fails there, is not compared; the last lines say why.
"""

from __future__ import annotations

from dataclasses import replace

from shardmark.budget import tolerated
from shardmark.checkout import Checkout
from shardmark.evidence import Interval, decided, fewest_rounds, interval, paired_ratios
from shardmark.passes import measure, rounds_while, shuffled, timed_step, warmed_up
from shardmark.plan import Measured, Plan, Rounds, Workload
from shardmark.world import World, Worlds

HERE, THERE = "here", "there"

_live: list[tuple[Plan, Workload]] = []
"""On a rank: what it is timing."""


class Ref:
    """The other version, and its worlds."""

    def __init__(self, checkout: Checkout, device: str) -> None:
        self.checkout = checkout
        self.worlds = Worlds(device, checkout=checkout)

    def measured(self, plan: Plan, deadline: float) -> list[Measured]:
        """What each rank of that version measures of the case alone: memory and counters."""
        alone = replace(plan, peer=None, limits=None, observers=(), trace=None, rounds=Rounds(minimum=1, maximum=1))
        return self.worlds.get(plan.world_size).run(measure, alone, deadline=deadline)

    def race(self, plan: Plan, world: World, confidence: float) -> Interval:
        """The ratio of this version's time to that one's, from rounds in turns."""
        worlds = {HERE: world, THERE: self.worlds.get(plan.world_size)}
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        try:
            warm = [max(each.run(_begin, plan)) for each in worlds.values()]
            first = max(fewest_rounds(confidence), plan.rounds.count(max(warm)))
            for _ in rounds_while(lambda: not _is_decided(seconds, confidence), first, plan.rounds):
                for name in shuffled(list(worlds)):
                    seconds[name].append(max(worlds[name].run(_step)))
        finally:
            for each in worlds.values():
                if each.alive:
                    each.run(_end)
        return interval(paired_ratios(seconds[HERE], seconds[THERE]), confidence)

    def close(self) -> None:
        """End its worlds and remove its files."""
        self.worlds.close()
        self.checkout.remove()


def _is_decided(seconds: dict[str, list[float]], confidence: float) -> bool:
    return decided(paired_ratios(seconds[HERE], seconds[THERE]), tolerated(1.0), confidence)


def _begin(plan: Plan) -> float:
    """Make the workload on this rank and warm it up; what its last step took."""
    _live[:] = [(plan, warmed_up(plan))]
    return _step()


def _step() -> float:
    plan, workload = _live[0]
    return timed_step(plan, workload, workload.step).seconds


def _end() -> None:
    _live.clear()
