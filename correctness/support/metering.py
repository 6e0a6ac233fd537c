"""Meter a case on ranks and compare with formulas; repeats, as a backend's thread may free a tensor unmetered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardmark.memory import Memory, meter
from shardmark.passes import meter_pass
from shardmark.plan import Plan, Rounds, Workload
from shardmark.registry import Implementation
from shardmark.world import World

PASSES = 10
"""At most so many, of which each figure's smallest counts: what the backend's thread releases last is not metered."""
UNSEEN = 1e-3
"""What may seem to stay even so, as a share: the small tensors in which ranks describe their modules to one another."""


def plan_of(workload: type[Workload], implementation: Implementation, case: Any, ranks: int = 2) -> Plan:
    """To meter the case, and time nothing."""
    return Plan(workload, implementation, None, case, "cpu", ranks, Rounds())


def metered(workload: type[Workload], implementation: Implementation, case: Any, ranks: int = 2) -> Memory:
    """What this rank holds of the case, metered once and not timed; the other ranks are in here too."""
    _, memory, _ = meter_pass(plan_of(workload, implementation, case, ranks))
    return memory


def peak_of_a_step(workload: type[Workload], implementation: Implementation, case: Any) -> int:
    """This rank's tensors at the peak of the second step, which later ones repeat; the other ranks are in here too."""
    with meter("cpu") as memory:
        step = workload(implementation, case, "cpu")
        for _ in range(2):
            step.prepare()
            memory.reset_peak()
            step.step(lambda part: None)
    return memory.tensors


def assert_metered(
    world: World,
    expected: Sequence[dict[str, int]],
    function: Callable[..., dict[str, int]],
    *args: Any,
    below: float = 0.0,
) -> None:
    """Each figure that `function(*args)` gives on a rank is the expected one there, but for what is released unseen;
    or up to that share of it `below`, where formulas speak of the rank that holds most.
    """
    least = world.run(function, *args)
    for _ in range(PASSES - 1):
        if not _beyond(least, expected, below):
            break
        for old, new in zip(least, world.run(function, *args), strict=True):
            old.update({name: min(value, new[name]) for name, value in old.items()})
    beyond = _beyond(least, expected, below)
    assert not beyond, "; ".join(beyond)


def _beyond(found: Sequence[dict[str, int]], expected: Sequence[dict[str, int]], below: float) -> list[str]:
    beyond = [
        f"{name} on rank {rank}: {found[rank][name]:,} bytes against {value:,}"
        for rank, figures in enumerate(expected)
        for name, value in figures.items()
        if not (1 - below) * value <= found[rank][name] <= (1 + UNSEEN) * value
    ]
    for name in expected[0]:  # whatever other ranks have, one of them has what is expected
        most, formula = (max(figures[name] for figures in ranks) for ranks in (found, expected))
        if most < (1 - UNSEEN) * formula:
            beyond.append(f"{name} on the rank with most: {most:,} bytes against {formula:,}")
    return beyond
