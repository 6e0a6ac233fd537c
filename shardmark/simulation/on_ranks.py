"""What each operator and each collective takes on this machine's ranks, all of which measure at once, as they run."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from shardmark.passes import timed_step, warmed_up
from shardmark.plan import Plan
from shardmark.simulation.program import GROUP, SUM, Call, Layout

MOST_ROUNDS, LEAST_ROUNDS = 30, 5


@dataclass(frozen=True)
class Sent:
    """What a collective takes, in seconds."""

    launch: float
    """Of the host, to start it."""
    alone: float
    """From then on, where the host waits for it."""
    beside: float
    """The same, where the host computes meanwhile."""
    pace: float
    """What the host gets done meanwhile, beside what it would."""


def operator_seconds(calls: Sequence[Call], budget: float, device: str, seed: int = 0) -> list[float]:
    """Median seconds of each, in rounds of random order."""
    coin = random.Random(seed)
    pool = _Pool(device)
    made = [(call.operator, pool.tensors(call.args), dict(pool.tensors(call.kwargs))) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for done in range(MOST_ROUNDS):
            late = torch.tensor(float(done >= LEAST_ROUNDS and time.perf_counter() - began > budget))
            if _together(late):
                break
            for i in coin.sample(range(len(calls)), len(calls)):
                found[i].append(_seconds(*made[i], device=device))
    return [median(each[1:]) if len(each) > 1 else 0.0 for each in found]


def _seconds(operator: Any, args: Any, kwargs: Any, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    before = waited()
    began = time.perf_counter()
    result = operator(*args, **kwargs)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del result
    return seconds - (waited() - before)


def step_seconds(plan: Plan, count: int) -> list[tuple[float, float]]:
    """Of so many steps on this rank: seconds, and those of them for which its thread waited for a core."""
    workload = warmed_up(plan)
    found = []
    for _ in range(count):
        before = waited()
        seconds = timed_step(plan, workload, workload.step).seconds
        found.append((seconds, waited() - before))
    return found


def waited() -> float:
    """Seconds so far for which this thread was ready to run and others had its core; 0 where nobody counts."""
    try:
        if not hasattr(_open, "file"):
            _open.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115 (for the thread's life)
        return int(os.pread(_open.file.fileno(), 100, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


_open = threading.local()


def collective_seconds(calls: Sequence[Call], budget: float, device: str) -> list[Sent]:
    """Of each, on all ranks."""
    pool = _Pool(device)
    unit = torch.randn(96, 96, device=device)
    out = torch.empty_like(unit)

    def compute() -> None:
        torch.mm(unit, unit, out=out)

    made = [(call.operator, pool.tensors(call.args)) for call in calls]
    found: list[list[Sent]] = [[] for _ in calls]
    began = time.perf_counter()
    each_alone = _seconds_of(compute)
    for done in range(MOST_ROUNDS):
        late = torch.tensor(float(done >= LEAST_ROUNDS and time.perf_counter() - began > budget))
        if _together(late):
            break
        for i in random.Random(done).sample(range(len(calls)), len(calls)):
            found[i].append(_sent(*made[i], compute, each_alone))
    figures = [
        [_quieter([getattr(each, name) for each in rounds[1:]]) for name in ("launch", "alone", "beside")]
        + [median(each.pace for each in rounds[1:])]
        for rounds in found
    ]
    return [Sent(*each) for each in figures]


def _sent(operator: Any, args: Any, compute: Callable[[], None], each_alone: float) -> Sent:
    dist.barrier()
    began = time.perf_counter()
    handle = _handle(operator(*args))
    launched = time.perf_counter()
    handle.wait()
    over = time.perf_counter()
    dist.barrier()
    handle = _handle(operator(*args))
    beside_began, units = time.perf_counter(), 0
    while not handle.is_completed():
        compute()
        units += 1
    handle.wait()
    beside = time.perf_counter() - beside_began
    return Sent(launched - began, over - launched, beside, min(1.0, units * each_alone / beside))


def _quieter(values: list[float]) -> float:
    """Their lower quartile: others on this machine can only add."""
    return sorted(values)[len(values) // 4]


def _seconds_of(compute: Callable[[], None]) -> float:
    found = []
    for _ in range(200):
        began = time.perf_counter()
        compute()
        found.append(time.perf_counter() - began)
    return median(found)


def _handle(result: Any) -> Any:
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


def _together(value: Tensor) -> bool:
    """Whether it is so on any rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


class _Pool:
    """Tensors by layout: calls share them, as each is measured alone."""

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
