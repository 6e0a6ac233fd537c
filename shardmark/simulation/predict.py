"""What a case would take: the passes over it, as they are, where no kernel runs and no other rank is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardmark.blocks import without_operators
from shardmark.excess import Held
from shardmark.memory import release
from shardmark.passes import WARMUPS, blocks_at_peak, meter_pass
from shardmark.plan import Measured, Plan
from shardmark.simulation.cuda import rules_of_cuda
from shardmark.simulation.group import gloo, nccl, one_rank_of
from shardmark.simulation.hardware import CPU, Hardware
from shardmark.simulation.kernels import no_kernels


def predict(plan: Plan, rank: int = 0, on: Hardware = CPU) -> Measured:
    """What that rank of the plan's world would meter on that hardware, and what its observers of memory would see.

    Unsupported, in one line, for a program whose operators depend on values.
    """
    with simulation(plan.world_size, rank, on):
        with without_operators():
            workload, memory, _ = meter_pass(plan)
        measured = Measured(workload.backend, memory)
        del workload
        for observer in plan.observers:
            measured.observed[observer] = observer.on_rank(plan, measured)
    return measured


def predicted_at_peak(plan: Plan, on: Hardware = CPU, rank: int = 0, warmups: int = WARMUPS) -> list[Held]:
    """The tensors that would be live on that rank at the peak of the step after so many, largest first."""
    with simulation(plan.world_size, rank, on):
        return blocks_at_peak(plan, warmups)


@contextmanager
def simulation(ranks: int = 1, rank: int = 0, on: Hardware = CPU) -> Iterator[None]:
    """In the block no kernels run: this process is that rank of so many on that hardware. All tensors are on "cpu"."""
    of_cuda = on.device == "cuda"
    gc.freeze()  # what there is already need not be searched for garbage each time
    try:
        with one_rank_of(ranks, rank, "nccl" if of_cuda else "gloo"), ExitStack() as rules:
            if of_cuda:
                rules.enter_context(no_kernels(nccl, rules.enter_context(rules_of_cuda(on))))
            else:
                rules.enter_context(no_kernels(gloo))
            try:
                yield
            finally:
                release("cpu")
    finally:
        gc.unfreeze()
