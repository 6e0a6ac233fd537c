"""What a case would take: the passes over it, as they are, where no kernel runs and no other rank is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shardmark.blocks import without_operators
from shardmark.excess import Held
from shardmark.memory import release
from shardmark.passes import blocks_at_peak, meter_pass
from shardmark.plan import Measured, Plan
from shardmark.simulation.group import gloo, one_rank_of
from shardmark.simulation.kernels import no_kernels


def predict(plan: Plan, rank: int = 0) -> Measured:
    """What that rank of the plan's world would meter on the CPU, and what its observers of memory would see there.

    Unsupported, in one line, for a program whose operators depend on values.
    """
    with _simulation(plan, rank):
        with without_operators():
            workload, memory, _ = meter_pass(plan)
        measured = Measured(workload.backend, memory)
        del workload
        for observer in plan.observers:
            measured.observed[observer] = observer.on_rank(plan, measured)
    return measured


def predicted_at_peak(plan: Plan) -> list[Held]:
    """The tensors that would be live at the peak of a steady-state step on the first rank, largest first."""
    with _simulation(plan, 0):
        return blocks_at_peak(plan)


@contextmanager
def _simulation(plan: Plan, rank: int) -> Iterator[None]:
    gc.freeze()  # what there is already need not be searched for garbage each time
    try:
        with one_rank_of(plan.world_size, rank), no_kernels(gloo):
            try:
                yield
            finally:
                release(plan.device)
    finally:
        gc.unfreeze()
