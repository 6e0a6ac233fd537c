"""The passes over a case: one under the memory meter, timed rounds of the case and its peer, and the observers' passes.

Everything here runs on the ranks of a world, in the process that holds the device; a single-device case is a world of
one. The results are plain numbers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardmark.api.registry import Implementation, Unsupported
from shardmark.api.workload import Mark, Workload
from shardmark.meter.clock import MEETING, Laps, Stopwatch
from shardmark.meter.counters import count
from shardmark.meter.disturbances import Threads
from shardmark.meter.gpu import GpuWatch
from shardmark.meter.l2 import flush_l2, l2_bytes
from shardmark.meter.load import Load
from shardmark.meter.memory import Memory, meter, release
from shardmark.meter.plan import IMPLEMENTATION, LOAD, PEER, Measured, Plan, Rounds
from shardmark.meter.recording import no_gc
from shardmark.meter.trace import nvtx_range
from shardmark.verdict.betting import fewest_rounds
from shardmark.verdict.budget import RANKS_ALIKE

T = TypeVar("T")

WARMUPS = 2
"""The first step makes the optimizer's state, the second torch DDP's final buckets."""

FIRST, SECOND, MEDIAN = "first", "second", "median"
"""Steps whose peaks are metered one by one. Budgets judge the third, which all later steps repeat."""

MOST_PASSES = 10
"""Multi-rank metering repeats at most this often; the smallest peak counts. On a busy machine every second pass of
PyTorch's DDP is some bytes over."""

PATIENCE = 50
"""Rounds are added while a verdict is undecided, for at most this many times `Rounds.max_seconds`: with its warm-ups a
case then takes a minute at most."""

LOOK = 1.25
"""The verdict is looked at again when the rounds have grown by this factor."""

WARM, MOST_WARM = 0.2, 1000
"""Seconds of untimed steps before a rate, in which a GPU's clocks rise; the most of them."""

NEAR = 1.001
"""A peak may exceed its formula by this factor: formulas leave out single values, such as an optimizer's counters."""


def measure(plan: Plan) -> Measured:
    """Meter, time and observe on this rank. Every rank of the world must call it together.

    A pass of the meter can overstate: on CUDA libraries take workspaces in the first pass, and among ranks a backend's
    thread may release a tensor unseen. So there are two passes on CUDA, and up to ten among ranks; the smallest counts.
    """
    with nvtx_range(f"{plan.case} {plan.implementation}", plan.device), ExitStack() as observing:
        for observer in plan.observers:
            observing.enter_context(observer.around(plan))
        try:
            measured = _meter_and_time(plan)
            for observer in plan.observers:
                measured.observed[observer] = observer.on_rank(plan, measured)
            return measured
        finally:
            release(plan.device)


def _meter_and_time(plan: Plan) -> Measured:
    workload, memory, first_step = meter_pass(plan)
    first_peak = memory.peaks[FIRST]
    for passes in range(1, MOST_PASSES):
        if not (plan.device == "cuda" and passes == 1) and not _overstated(plan, memory.tensors):
            break
        del workload
        workload, again, _ = meter_pass(plan)
        memory = min(memory, again, key=lambda memory: memory.tensors)
    memory.peaks[FIRST] = first_peak
    measured = timed_rounds(plan, memory, workload)
    measured.first_step = first_step
    measured.counters = count(workload, plan.device, partial(_largest, plan))
    return measured


def _overstated(plan: Plan, peak: int) -> bool:
    """Whether a rank's peak exceeds the formula or the older row, or another rank's peak by more than a factor of
    RANKS_ALIKE where ranks are alike."""
    if plan.world_size == 1 or plan.memory is None:
        return False
    least, most = -_largest(plan, -peak), _largest(plan, peak)
    larger = plan.tensors_before is not None and most > plan.tensors_before
    return larger or most > NEAR * plan.memory.formula or (plan.memory.alike and most > RANKS_ALIKE * least)


Steady = Callable[[Callable[[Mark], None], Mark], None]
"""Called with the workload's step and a mark to run the steady-state step."""


def meter_pass(plan: Plan, steady: Steady = lambda step, mark: step(mark)) -> tuple[Workload, Memory, float]:
    """Make the workload and run its first steps under the meter: (workload, its memory, seconds of the first step)."""
    release(plan.device)
    with meter(plan.device) as memory:
        workload = plan.workload(plan.implementation, plan.case, plan.device)
        memory.mark("after_init")
        workload.prepare()
        for observer in plan.observers:
            observer.before_first_step(memory)
        memory.reset_peak()
        watch = Stopwatch(plan.device)
        watch.start()
        workload.step(watch.mark)
        first_step = watch.stop().seconds
        memory.keep_peak(FIRST)
        memory.reset_peak()
        for _ in range(WARMUPS - 1):
            workload.prepare()
            workload.step(lambda part: None)
        memory.keep_peak(SECOND)
        memory.stage("warm-up")
        workload.prepare()
        memory.mark("before_step")
        memory.reset_peak()
        steady(workload.step, lambda part: memory.mark(f"after_{part}"))
        memory.mark("after_step")
        memory.keep_peak(MEDIAN)
    stages = memory.stages if len(memory.stages) > 1 else {}  # "warm-up" alone: the workload reports none
    figures = {each.name: getattr(memory, each.name) for each in fields(Memory)}
    return workload, Memory(**{**figures, "stages": stages}), first_step


def timed_rounds(plan: Plan, memory: Memory, mine: Workload) -> Measured:
    """Rounds in which the implementation, its peer and its parts take turns in random order, then the calibration load.

    Each of a pair's steps follows a step of the other one, which is not timed if need be: a step that follows its own
    kind finds other caches, and a coin would decide which of the two does.

    Enough rounds run for a verdict, if one is asked for. While the verdict is undecided, rounds of the implementation
    and its peer are added.
    """
    steps: dict[str, tuple[Workload, Callable[[Mark], None]]] = {IMPLEMENTATION: (mine, mine.step)}
    for observer in plan.observers:
        steps |= {name: (mine, getattr(mine, method)) for name, method in observer.timed.items()}
    if plan.peer is not None:
        theirs = plan.workload(plan.peer, plan.case, plan.device)
        steps[PEER] = (theirs, theirs.step)
    if plan.load:
        load = Load(plan.device)
        steps[LOAD] = (load, load.step)

    warmup_began = time.perf_counter()
    for warmup in range(plan.rounds.warmups):  # at least one
        warm: dict[str, Laps] = {}
        for name, step in list(steps.items()):
            if name == IMPLEMENTATION and warmup == 0 and plan.rounds.warmups > 1:
                continue  # it did its first steps under the meter
            try:
                warm[name] = timed_step(plan, *step)
            except Unsupported:
                if name != PEER:
                    raise
                del steps[PEER]  # the peer need not support every case of the implementation
        elapsed = _largest(plan, time.perf_counter() - warmup_began)
        if warmup > 0 and elapsed > plan.rounds.max_warmup_seconds:
            break
    rounds = plan.rounds.count(_largest(plan, warm[IMPLEMENTATION].elapsed))
    if plan.limits is not None and (plan.limits.seconds or PEER in steps):
        rounds = max(rounds, fewest_rounds(plan.limits.confidence))

    if plan.rates and l2_bytes(plan.device):
        for _ in range(min(MOST_WARM, math.ceil(WARM / max(_largest(plan, warm[IMPLEMENTATION].elapsed), 1e-9)))):
            timed_step(plan, mine, mine.step)

    # Equal on all ranks: one that began earlier would wait for the others in its first collective.
    ahead = {name: _largest(plan, host) if (host := warm[name].host) else 0.0 for name in steps}
    measured = Measured(mine.backend, memory, {name: [] for name in steps}, host=warm[IMPLEMENTATION].host)
    names = {IMPLEMENTATION: f"{plan.implementation} step", PEER: f"{plan.peer} step"}
    coin = random.Random(plan.coin)
    pair = [name for name in (IMPLEMENTATION, PEER) if name in steps]
    parts = [name for name in steps if name not in (*pair, LOAD)]
    with no_gc() if plan.rounds.disable_gc else nullcontext():
        began, threads, gpu = time.perf_counter(), Threads.now(), GpuWatch(plan.device)
        for i in rounds_while(lambda: _undecided(plan, measured), rounds, plan.rounds, partial(_largest, plan)):
            pair = shuffled(pair, coin)
            if len(pair) == 2:
                timed_step(plan, *steps[pair[1]], ahead[pair[1]])
            for name in [*pair, *(shuffled(parts, coin) if i < rounds else ()), *((LOAD,) if plan.load else ())]:
                with nvtx_range(names.get(name, f"{plan.implementation} {name}"), plan.device):
                    measured.laps[name].append(timed_step(plan, *steps[name], ahead[name]))
            gpu.sample()
        measured.gpu = gpu.figures()
        waited, elapsed = Threads.now().waited(threads, torch.get_num_threads()), time.perf_counter() - began
        measured.waited = waited / elapsed
    return measured


def rounds_while(
    undecided: Callable[[], bool], first: int, rounds: Rounds, largest: Callable[[float], float] = lambda own: own
) -> Iterator[int]:
    """Yield the numbers of rounds: `first` rounds, then more while `undecided()` and until they have taken too long.
    `largest` returns the largest of the ranks' seconds, so that all ranks decide alike."""
    done, began = 0, time.perf_counter()
    while done < first:
        yield from range(done, first)
        done = first
        if undecided():
            first = next_look(done, largest(time.perf_counter() - began), rounds)


def next_look(done: int, elapsed: float, rounds: Rounds) -> int:
    """The number of rounds at the next look; `done` if more would take too long."""
    affordable = math.floor(done * PATIENCE * rounds.max_seconds / elapsed) if elapsed > 0 else math.inf
    return max(done, int(min(math.ceil(done * LOOK), affordable)))


def _undecided(plan: Plan, measured: Measured) -> bool:
    """Whether the rounds so far leave a verdict open. Each round's slowest rank counts, so that all ranks agree."""
    if plan.limits is None:
        return False
    laps = [measured.laps[name] for name in (IMPLEMENTATION, PEER) if name in measured.laps]
    seconds, *peer_seconds = _largest(plan, [[lap.seconds for lap in each] for each in laps])
    return plan.limits.undecided(seconds, peer_seconds[0] if peer_seconds else None)


def timed_steps(plan: Plan, count: int) -> list[Laps]:
    """Time the first `count` steps of a new workload, including what warm-ups would hide."""
    workload = plan.workload(plan.implementation, plan.case, plan.device)
    return [timed_step(plan, workload, workload.step) for _ in range(count)]


def warmed_up(plan: Plan, count: int = WARMUPS) -> Any:
    """A new workload that has done `count` steps."""
    workload = plan.workload(plan.implementation, plan.case, plan.device)
    for _ in range(count):
        workload.prepare()
        workload.step(lambda part: None)
    return workload


def shuffled(names: Sequence[T], coin: random.Random | None = None) -> list[T]:
    """The names in random order, so that changes of the machine favour none of them."""
    return (coin or random.SystemRandom()).sample(names, len(names))


def timed_step(plan: Plan, workload: Workload, step: Callable[[Mark], None], ahead: float = 0.0) -> Laps:
    """Time one step on this rank, or each of the workload's `calls`; all ranks begin together. See `Stopwatch` for
    `ahead`, the host's seconds for one step."""
    workload.prepare()
    calls, together = getattr(workload, "calls", 1), plan.world_size > 1
    if plan.rates and calls == 1:
        flush_l2(plan.device)
    watch = Stopwatch(plan.device, ahead and calls * ahead + (MEETING if together else 0.0))
    if together:
        dist.barrier()
    watch.start(_meet if together else None)
    for _ in range(calls):
        step(watch.mark)
    return watch.stop().of_each(calls)


def _meet() -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"))


def _largest(plan: Plan, values: T) -> T:
    """The maximum over the ranks of a number, or of each number in lists, so that all ranks decide alike."""
    if plan.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=plan.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return cast(T, tensor.tolist())


def metered_peak(workload: type[Workload], implementation: Implementation, case: Any, device: str) -> int:
    """Bytes of tensors at the peak of a step; on CUDA the smaller of two, as libraries take workspaces in the first."""
    peaks = []
    for _ in range(2 if device == "cuda" else 1):
        release(device)
        with meter(device) as memory:
            made = workload(implementation, case, device)
            made.prepare()
            memory.reset_peak()
            made.step(lambda part: None)
        peaks.append(memory.tensors)
        del made
    release(device)
    return min(peaks)
