"""Predict a case's bytes and seconds: run the meter's own passes without kernels and without other ranks."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import torch

from shardmark.api.recipe import PLAIN
from shardmark.api.registry import Unsupported
from shardmark.api.workload import Mark
from shardmark.meter.at_peak import blocks_at_peak
from shardmark.meter.clock import MOST_AHEAD
from shardmark.meter.hardware import CPU, Hardware
from shardmark.meter.measure_case import WARMUPS, meter_pass
from shardmark.meter.memory import is_out_of_memory, release
from shardmark.meter.over_budget import Held
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.recording import without_operators
from shardmark.meter.timeline import by_layer_and_operator
from shardmark.predict.simulation.cuda import rules_of_cuda
from shardmark.predict.simulation.group import gloo, nccl, nccl_recording_streams, one_rank_of
from shardmark.predict.simulation.host_memory import HostMemory
from shardmark.predict.simulation.measured import rates_of
from shardmark.predict.simulation.no_kernels import no_kernels
from shardmark.predict.simulation.routing import Routing
from shardmark.predict.simulation.schedule import Schedule, Step
from shardmark.ranks.rank_state import seed_rank
from shardmark.rows.observers import timeline_pass


@dataclass
class Predicted(Measured):
    """Predicted measurements of one rank, and the schedule of a step by the hardware's name."""

    steps: dict[str, Step] = field(default_factory=dict)


def predict(plan: Plan, rank: int = 0, on: Hardware = CPU, alike: Sequence[Hardware] = ()) -> Predicted:
    """Predict one rank of the plan's world on the hardware `on`: its metered memory, its memory observers' results, and
    the schedule of a step. The schedule is predicted also for hardware that is `alike` but for its rates.

    Raises Unsupported, in one line, for a program whose operators depend on values.
    """
    steps: dict[str, Step] = {}
    ahead = 0.0 if on.device == "cpu" else MOST_AHEAD
    with simulation(plan.world_size, rank, on, routing=routing_of(plan)) as schedule:

        def steady(step: Callable[[Mark], None], mark: Mark) -> None:
            """The device begins once the first operators are launched, as when a step is timed."""
            if schedule.rates is None:
                step(mark)
            elif timed := schedule.step(partial(_marking, step, mark), ahead):
                steps[on.name] = timed

        with without_operators():
            workload, memory, _ = meter_pass(plan, steady)
        for other in alike:
            schedule.rates = rates_of(other, plan.world_size)
            if schedule.rates is None:
                continue
            workload.prepare()
            if timed := schedule.step(workload.step, ahead):
                steps[other.name] = timed
        measured = Predicted(workload.backend, memory, steps=steps)
        del workload
        for observer in plan.observers:
            measured.observed[observer] = observer.on_rank(plan, measured)
    return measured


def routing_of(plan: Plan) -> Routing | None:
    """The routing of a user's own model, if its recipe has one."""
    return Routing.of(getattr(plan.case, "recipe", PLAIN).routing)


def predicted_peer(plan: Plan, on: Hardware = CPU) -> Step | None:
    """A step of the plan's peer; None without a peer, or where it cannot be predicted."""
    if plan.peer is None:
        return None
    return _step(Plan(plan.workload, plan.peer, None, plan.case, "cpu", plan.world_size), on)


@cache  # many implementations have the same peer
def _step(plan: Plan, on: Hardware) -> Step | None:
    try:
        return predict(plan, on=on).steps.get(on.name)
    except Unsupported:
        return None


def _marking(step: Callable[[Mark], None], mark: Mark, and_mark: Mark) -> None:
    """Run the step; report each part to both callbacks."""

    def both(part: str) -> None:
        mark(part)
        and_mark(part)

    step(both)


def predicted_at_peak(plan: Plan, on: Hardware = CPU, rank: int = 0, warmups: int = WARMUPS) -> list[Held]:
    """The tensors live on that rank at the peak of the step after the warm-ups, the largest first."""
    with simulation(plan.world_size, rank, on, routing=routing_of(plan)):
        return blocks_at_peak(plan, warmups)


def kept_for_backward(plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes that forward leaves for backward on a CPU, by module (layers of a kind together) and operator."""
    with simulation(plan.world_size, routing=routing_of(plan)):
        return by_layer_and_operator(timeline_pass(plan).activations)


@contextmanager
def simulation(
    ranks: int = 1,
    rank: int = 0,
    on: Hardware = CPU,
    *,
    records_streams: bool = False,
    schedule: Schedule | None = None,
    routing: Routing | None = None,
) -> Iterator[Schedule]:
    """In the block no kernels run: this process is rank `rank` of `ranks` on the hardware `on`. All tensors are on
    "cpu". With `records_streams` c10d calls `record_stream` for NCCL, as until 2025. `schedule` notes what is launched,
    by default at that hardware's rates. `routing` says which experts routers choose; without it a program that loops
    over experts depends on values.

    Yields the schedule. Raises Unsupported, in one line, where a tensor is larger than this machine's memory.
    """
    of_cuda = on.device == "cuda"
    schedule = schedule or Schedule(rates_of(on, ranks))
    with ExitStack() as stack:
        stack.enter_context(_garbage_is_new())
        stack.enter_context(_mapped_one_by_one())
        stack.enter_context(_drawing(rank))
        in_node = min(ranks, on.devices_per_node) if of_cuda else ranks
        stack.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=str(in_node)))  # as torchrun says
        stack.enter_context(one_rank_of(ranks, rank, "nccl" if of_cuda else "gloo", schedule))
        if of_cuda:
            collective = nccl_recording_streams if records_streams else nccl
            host = HostMemory(schedule)
            take = stack.enter_context(rules_of_cuda(on, schedule, host)).take
            stack.enter_context(no_kernels(partial(collective, schedule=schedule), take, schedule, routing, host))
        else:
            stack.enter_context(no_kernels(partial(gloo, schedule=schedule), None, schedule, routing))
        try:
            yield schedule
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise Unsupported("one of its tensors is larger than this machine's memory") from error
        finally:
            release("cpu")


_MMAP_THRESHOLD, _MAPPED, _USUAL = -3, 2**20, 2**25
"""For glibc's mallopt: the option, the size from which a simulation maps each block by itself, and the usual limit."""


@contextmanager
def _mapped_one_by_one() -> Iterator[None]:
    """Return each tensor's block to the system when it is freed. A heap would keep the address space of all of them,
    and the system refuses to fork a process that is larger than the machine's memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        yield
        return
    mallopt(_MMAP_THRESHOLD, _MAPPED)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL)


@contextmanager
def _garbage_is_new() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection does not search them each time."""
    if gc.get_freeze_count() > 0:  # the program's own objects, which would be thawed with ours
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _drawing(rank: int) -> Iterator[None]:
    """Seed by rank; restore the generators afterwards."""
    own, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_rank(torch.initial_seed() + rank)
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)
