"""Predict what a case would take: the meter's own pass, of one rank, with kernels and messages left out."""

from __future__ import annotations

from shardmark.passes import meter_pass
from shardmark.plan import Measured, Plan
from shardmark.simulation.group import gloo, one_rank_of
from shardmark.simulation.kernels import no_kernels


def predict(plan: Plan, rank: int = 0) -> Measured:
    """What that rank of the plan's world would meter on the CPU."""
    with one_rank_of(plan.world_size, rank), no_kernels(gloo):
        workload, memory, _ = meter_pass(plan)
        backend = workload.backend
        del workload
    return Measured(backend, memory)
