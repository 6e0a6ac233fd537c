"""The memory budget of a case without a formula: the simulated peak of its steady-state step.

A model that keeps more with every step does so in a simulation, too. So the third step is held to the second step's
peak, at most: by then the optimizer's state and torch DDP's buckets exist.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Self

from shardmark.api.registry import Unsupported, ranks_alike
from shardmark.meter.hardware import Hardware
from shardmark.meter.measure_case import MEDIAN, NEAR, SECOND, WARMUPS
from shardmark.meter.memory import Memory
from shardmark.meter.over_budget import Held
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.predict import predict, predicted_at_peak
from shardmark.ranks import torchrun
from shardmark.verdict.budget import MemoryBudget


class Predicted(int):
    """Predicted bytes at the peak; `held()` finds the tensors that are live there, largest first."""

    held: Callable[[], list[Held]]

    def __new__(cls, nbytes: int, held: Callable[[], list[Held]]) -> Self:
        predicted = super().__new__(cls, nbytes)
        predicted.held = held
        return predicted

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # ranks and rows get the bytes alone


def predicted_budget(
    plan: Plan, on: Hardware, slack: float = NEAR, of_ranks: Sequence[Memory] = (), *, every_rank: bool = True
) -> MemoryBudget:
    """The budget of the rank that needs most, among `of_ranks` where these are predicted already, else among all ranks.
    Without `every_rank` it is the first rank's, which needs most, or 0.4% less where ranks are assigned whole
    parameters.

    Raises Unsupported where there is no prediction, as for a program whose operators depend on values.
    """
    if torchrun.launched():
        raise Unsupported("torchrun's first rank has a process group, and a simulation needs one of its own")
    bare = Plan(plan.workload, plan.implementation, None, plan.case, "cpu", plan.world_size)
    peaks = [memory.peaks for memory in of_ranks or _predictions(bare, on, plan.world_size if every_rank else 1)]
    rank = max(range(len(peaks)), key=lambda rank: _steady(peaks[rank]))
    warmups = WARMUPS - 1 if peaks[rank][SECOND] <= peaks[rank][MEDIAN] else WARMUPS
    held = partial(predicted_at_peak, bare, on, rank, warmups)
    workspace = plan.implementation.workspace(plan.case, on.device)
    alike = ranks_alike(plan.implementation, plan.case)
    return MemoryBudget(Predicted(_steady(peaks[rank]), held), slack, workspace, source="prediction", alike=alike)


@cache  # many implementations have the same peer
def _predictions(plan: Plan, on: Hardware, ranks: int) -> list[Memory]:
    with warnings.catch_warnings(action="ignore"):  # the real run gives them
        return [predict(plan, rank, on).memory for rank in range(ranks)]


def _steady(peaks: dict[str, int]) -> int:
    """The smaller of the second and the third step's peak: in its second step torch DDP holds old buckets beside new
    ones."""
    return min(peaks[SECOND], peaks[MEDIAN])
