"""A plan in time: when each action begins and ends, where passes take given times and messages none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from impl.pipeline.actions import COMPUTES, Action, Kind, Plan, ranks_of_stages
from impl.pipeline.messages import done_as, needed_by

UNITS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
"""Times of a stage's passes: each of the three products of a layer takes as long."""


@dataclass(frozen=True)
class Timed:
    """An action of a rank, from `begin` to `end`."""

    action: Action
    begin: float
    end: float


def timeline(plan: Plan, times: Mapping[Kind, float] = UNITS) -> list[list[Timed]]:
    """When each rank computes what: each action as soon as it is the rank's turn and it has what it needs."""
    stages = len(ranks_of_stages(plan))
    left = [[action for action in reversed(actions) if action.kind in COMPUTES] for actions in plan]
    found: list[list[Timed]] = [[] for _ in plan]
    ends: dict[Action, float] = {}
    while any(left):
        moved = False
        for rank, actions in enumerate(left):
            while actions:
                action = actions[-1]
                needed = needed_by(action, stages)
                if needed is not None and needed not in ends:
                    break
                ready = 0.0 if needed is None else ends[needed]
                begin = max(ready, found[rank][-1].end if found[rank] else 0.0)
                found[rank].append(Timed(action, begin, begin + times[action.kind]))
                ends[done_as(action)] = found[rank][-1].end
                actions.pop()
                moved = True
        if not moved:
            raise ValueError("each rank waits for another one")
    return found


def bubble(timed: list[list[Timed]]) -> float:
    """The mean share of a step, from its first begin to its last end, for which a rank does not compute."""
    end = max(actions[-1].end for actions in timed)
    computes = sum(each.end - each.begin for actions in timed for each in actions)
    return 1 - computes / (len(timed) * end)


def drawn(timed: list[list[Timed]]) -> str:
    """A line for each rank, a cell for each unit of time: 0F1 and the like, written once, and dots while it waits."""
    width = 1 + max(len(str(each.action)) for actions in timed for each in actions)
    lines = []
    for rank, actions in enumerate(timed):
        cells = [".".ljust(width)] * round(max(each.end for actions in timed for each in actions))
        for each in actions:
            cells[round(each.begin) : round(each.end)] = [str(each.action).ljust(width)] + [" " * width] * (
                round(each.end - each.begin) - 1
            )
        lines.append(f"rank {rank}  {''.join(cells)}".rstrip())
    return "\n".join(lines)
