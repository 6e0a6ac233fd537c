"""Time operators and collectives on ranks of this machine, all of which measure at once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_leaves

from shardmark.meter.clock import Laps, Stopwatch
from shardmark.meter.measure_case import timed_step, warmed_up
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.program import GROUP, SUM, Call, Layout

MOST_ROUNDS, LEAST_ROUNDS = 30, 5
MOST_ROUNDS_OF_COLLECTIVES = 200
BEFORE = 5e-4
"""Seconds for which the ranks compute before a collective, as they do in a step: the collective's threads wake up later
then."""
SILENT = {"c10d::recv_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_"}
"""Collectives whose Gloo handles report completion only once waited for."""
MOST_POOLS = 16
COLD = 2**26
"""Bytes that collectives use before they use a tensor again: more than caches hold."""


@dataclass(frozen=True)
class Sent:
    """Seconds that a collective takes."""

    launch: float
    """Seconds the host takes to start it."""
    alone: float
    """Seconds from the launch to the end, while the host waits for it."""
    beside: float
    """Seconds from the launch to the end, while the host computes."""
    pace: float
    """Fraction of its usual work that the host does while it computes beside the collective."""


def operator_seconds(calls: Sequence[Call], budget: float, device: str, seed: int = 0) -> list[float]:
    """Median seconds of each call, over rounds in random order."""
    return [median(each) if each else 0.0 for each in operator_times(calls, budget, device, seed)]


def operator_times(
    calls: Sequence[Call], budget: float, device: str, seed: int = 0, skip: tuple[type[Exception], ...] = ()
) -> list[list[float]]:
    """Seconds of each call in each round but the first; rounds are in random order. None of a call that raises an error
    of the kinds to `skip`, as it has no kernel here."""
    coin = random.Random(seed)
    pool = _Pool(device)
    made = [(call.operator, pool.tensors(call.args), dict(pool.tensors(call.kwargs))) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    known = list(range(len(calls)))
    began = time.perf_counter()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for done in range(MOST_ROUNDS):
            if _late(done, began, budget, device):
                break
            for i in coin.sample(known, len(known)):
                try:
                    found[i].append(_seconds(*made[i], device=device))
                except skip:
                    known.remove(i)
    return [each[1:] for each in found]


LAUNCHED = 2e-4
"""Seconds for which a GPU spins while the host launches a single operator."""


def _seconds(operator: Any, args: Any, kwargs: Any, device: str) -> float:
    watch, before = Stopwatch(device, LAUNCHED), waited()
    watch.start()
    result = operator(*args, **kwargs)
    seconds = watch.stop().seconds
    del result
    return seconds - (waited() - before if device == "cpu" else 0.0)


def step_seconds(plan: Plan, count: int) -> list[tuple[float, float]]:
    """Seconds of each of `count` steps on this rank, and the seconds in which its thread waited for a core."""
    return [(laps.seconds, without_core) for laps, without_core in step_laps(plan, count)]


def step_laps(plan: Plan, count: int) -> list[tuple[Laps, float]]:
    """Laps of each step, with its parts, in place of the seconds that `step_seconds` returns."""
    workload = warmed_up(plan)
    found = []
    for _ in range(count):
        before = waited()
        laps = timed_step(plan, workload, workload.step)
        found.append((laps, (waited() - before) / laps.calls))
    return found


def waited() -> float:
    """Seconds so far in which this thread was ready to run and had no core; 0 where the kernel does not count."""
    try:
        if not hasattr(_open, "file"):
            _open.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115 (for the thread's life)
        return int(os.pread(_open.file.fileno(), 100, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


_open = threading.local()


def collective_seconds(calls: Sequence[Call], budget: float, device: str) -> list[Sent]:
    """Seconds of each collective, measured on all ranks together."""
    unit = torch.randn(96, 96, device=device)
    out = torch.empty_like(unit)

    def compute() -> None:
        torch.mm(unit, unit, out=out)

    each_alone = _seconds_of(compute)

    def before() -> None:
        for _ in range(round(BEFORE / each_alone)):
            compute()

    made = [[(_sender(call), pool.tensors(call.args)) for call in calls] for pool in _cold_pools(calls, device)]
    found: list[list[Sent]] = [[] for _ in calls]
    began = time.perf_counter()
    for done in range(MOST_ROUNDS_OF_COLLECTIVES):
        if _late(done, began, budget, device):
            break
        calls_now = made[done % len(made)]
        order = random.Random(done).sample(range(len(calls)), len(calls))
        alone = {i: _alone(*calls_now[i], before, device) for i in order}
        for i in order:
            # A GPU's host computes nothing itself.
            beside = (
                (alone[i][1], 1.0)
                if device == "cuda"
                else _beside(*calls_now[i], compute, each_alone, sum(alone[i]), calls[i].name not in SILENT)
            )
            found[i].append(Sent(*alone[i], *beside))
    return [mean_of(rounds[1:]) for rounds in found]


def _cold_pools(calls: Sequence[Call], device: str) -> list[_Pool]:
    """Enough pools for a tensor to leave the caches before its next use."""
    layouts = [each for each in tree_leaves([call.args for call in calls]) if isinstance(each, Layout)]
    nbytes = sum(layout.elements * layout.dtype.itemsize for layout in layouts)
    return [_Pool(device) for _ in range(min(MOST_POOLS, -(-COLD // max(1, nbytes))))]


def mean_of(measured: Sequence[Sent]) -> Sent:
    """The mean, as a step is a sum of many. Gloo's threads wake at once, or milliseconds later where others hold the
    core, so that no quantile stands for both."""
    beside = mean(each.beside for each in measured)
    pace = mean(each.pace * each.beside for each in measured) / beside
    return Sent(mean(each.launch for each in measured), mean(each.alone for each in measured), beside, pace)


def _alone(operator: Any, args: Any, before: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds to launch the collective, and seconds after that. No barrier precedes it, as its threads would still be
    awake."""
    before()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    handle = _handle(operator(*args))
    launched = time.perf_counter()
    handle.wait()
    if device == "cuda":
        torch.cuda.synchronize()  # NCCL's handles make the stream wait, and not the host
    return launched - began, time.perf_counter() - launched


def _beside(
    operator: Any, args: Any, compute: Callable[[], None], each_alone: float, alone: float, says: bool
) -> tuple[float, float]:
    """Seconds of the collective while the host computes, and the host's pace meanwhile. Where its handle never `says`
    that it is complete, the host computes for as long as the collective takes alone."""
    dist.barrier()
    handle = _handle(operator(*args))
    began, units = time.perf_counter(), 0
    while not handle.is_completed() and (says or time.perf_counter() - began < alone):
        compute()
        units += 1
    handle.wait()
    seconds = time.perf_counter() - began
    return seconds, min(1.0, units * each_alone / seconds)


def _sender(call: Call) -> Callable[..., Any]:
    """Function that starts the collective. Ranks exchange messages: receiving takes the time, sending adds nothing."""
    if call.name == "c10d::send":
        return lambda *args: _Message([])
    return _exchange if call.name == "c10d::recv_" else call.operator


@dataclass(frozen=True)
class _Message:
    works: Sequence[Any]

    def is_completed(self) -> bool:
        return not self.works

    def wait(self) -> None:
        for each in self.works:
            each.wait()


def _exchange(tensors: list[Tensor], group: Any, source: int, tag: int) -> _Message:
    """Receive as the first rank does, from as many ranks further on, and send as many back."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.ops.c10d.recv_(tensors, group, (rank + source) % ranks, tag)
    sent = torch.ops.c10d.send([torch.empty_like(each) for each in tensors], group, (rank - source) % ranks, tag)
    return _Message([Work.unbox(received), Work.unbox(sent)])


def _seconds_of(compute: Callable[[], None]) -> float:
    found = []
    for _ in range(200):
        began = time.perf_counter()
        compute()
        found.append(time.perf_counter() - began)
    return median(found)


def _handle(result: Any) -> Any:
    if isinstance(result, _Message):
        return result
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


def _late(done: int, began: float, budget: float, device: str) -> bool:
    """True where enough rounds are done and a rank's budget is used up; half as many where it is used up twice."""
    spent = time.perf_counter() - began
    enough = LEAST_ROUNDS if spent < 2 * budget else LEAST_ROUNDS / 2
    late = torch.tensor(float(done >= enough and spent > budget), device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late)


class _Pool:
    """Tensors by layout. Calls share them, as each call is measured alone."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._made: dict[tuple[Layout, int], Tensor] = {}

    def tensors(self, value: Any) -> Any:
        """The arguments, with tensors for layouts."""
        return self._filled(value, {})

    def _filled(self, value: Any, used: dict[Layout, int]) -> Any:
        if isinstance(value, Layout):
            used[value] = used.get(value, 0) + 1
            key = value, used[value]
            if key not in self._made:
                self._made[key] = _tensor(value, self.device)
            return self._made[key]
        if isinstance(value, tuple):
            return [self._filled(each, used) for each in value]
        if value == GROUP:
            return dist.group.WORLD.boxed()  # type: ignore[union-attr]
        if value == SUM:
            return torch.classes.c10d.ReduceOp()
        return value


def _tensor(layout: Layout, device: str) -> Tensor:
    room = layout.elements
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        flat = torch.rand(room, device=device).add_(0.5).to(layout.dtype)
    else:
        flat = torch.randint(0, layout.largest + 1, (room,), device=device).to(layout.dtype)
    return flat.as_strided(layout.shape, layout.stride)
