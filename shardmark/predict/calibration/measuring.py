"""Calibrate a device: time its points on ranks of this machine, and make hardware of their times."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median, quantiles
from typing import Any, Protocol, cast

import torch

from shardmark.api.registry import Implementation
from shardmark.meter.clock import Laps
from shardmark.meter.hardware import THIS, Hardware, of_this_machine
from shardmark.meter.plan import Plan
from shardmark.meter.roofline import Roofline, measure_roofline, published_peak
from shardmark.predict.calibration.figures import Timings, hardware_of, per_launch, with_launches
from shardmark.predict.calibration.points import SIZES, collectives, operators
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.measured import rates_of
from shardmark.predict.simulation.on_ranks import collective_seconds, operator_times, step_laps
from shardmark.predict.simulation.program import Call
from shardmark.predict.simulation.this_machine import Small, events_of
from shardmark.ranks.worlds import Worlds

SHARES = {"operators": 0.55, "collectives": 0.15}
"""Shares of the time that is given; the rest is for lists of points, launches, and what was estimated too short."""
ROUNDS = 8
"""Rounds that must fit into the time: points that take longer are left out, the longest first."""
SLOWER = 4
"""An operator is expected to take this many times the time of its bytes and products."""
NO_KERNEL = (RuntimeError, TypeError, ValueError, IndexError)
"""Errors of an operator that does not run here, such as a kernel that this GPU lacks."""
STEPS = 60
LOUD = 0.1
"""Share of a core's time taken by others, or median spread of a point, from which a machine counts as loaded."""


class Timer(Protocol):
    """Times on a device."""

    def roofline(self, dtype: torch.dtype) -> Roofline:
        """Rates of one large product and one large copy."""

    def operators(self, calls: Mapping[Call, Cost], budget: float) -> list[list[float]]:
        """Seconds of each call in each round; none of one that does not run here."""

    def collectives(self, calls: Mapping[Call, tuple[str, int]], budget: float) -> list[float]:
        """Seconds of each collective."""

    def small_steps(self) -> list[Laps]:
        """Steps of `Small`, a known program of tiny operators."""


@dataclass
class Calibration:
    """The hardware, and how well it was measured."""

    hardware: Hardware
    points: int
    spreads: list[float] = field(default_factory=list)
    """The interquartile range of each operator's seconds over its median."""
    left_out: list[str] = field(default_factory=list)
    """Operators that do not run here, or would have taken too long."""

    def summary(self) -> str:
        """The largest rates in a few words."""
        on, reached = self.hardware, self.hardware.reached
        products = ", ".join(
            f"{dtype} {rate * reached.products[dtype] / 1e12:.3g} TFLOP/s" for dtype, rate in on.flops.items()
        )
        link = f", link {on.link * reached.link / 1e9:.3g} GB/s" if on.link > 0 else ""
        launches = f"{reached.launch * 1e6:.3g} and {reached.backward_launch * 1e6:.3g} us a launch"
        return f"{products}; memory {on.bandwidth * reached.bandwidth / 1e9:.3g} GB/s{link}; {launches}"

    def lines(self) -> Iterator[str]:
        """How well it was measured, as sentences."""
        if self.spreads:
            middle, worst = median(self.spreads), max(self.spreads)
            tenth = quantiles(self.spreads, n=10)[-1] if len(self.spreads) > 1 else worst
            yield (
                f"{self.points:,} points; the middle half of an operator's times spans {middle:.0%} of their median; "
                f"one operator in ten spans more than {tenth:.0%}"
            )
            if middle > LOUD:
                yield "the machine was loaded: calibrate again on a quiet one for times to rely on"
        if self.left_out:
            yield f"left out: {', '.join(self.left_out)}"


def calibrate(device: str, ranks: int, minutes: float, dtypes: Sequence[str]) -> Calibration:
    """Calibrate this machine's device, with as many ranks at once. WorldError where it does not allow as many."""
    worlds = Worlds(device)
    worlds.deadline = 120 * minutes + 600
    try:
        return calibrated(
            OnRanks(worlds, ranks), base(device, ranks), ranks, 60 * minutes, dtypes, peaks(device, dtypes)
        )
    finally:
        worlds.close()


def base(device: str, ranks: int) -> Hardware:
    """The device as it is known before it is measured: its memory, its rules and its links."""
    known = of_this_machine(device)
    if device == "cuda":
        return known
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(known, memory_bytes=nbytes // ranks, devices_per_node=ranks)


def peaks(device: str, dtypes: Sequence[str]) -> dict[str, float]:
    """The data sheet's FLOP/s."""
    if device == "cpu":
        return {}
    found = {dtype: published_peak(torch.cuda.get_device_name(), getattr(torch, dtype)) for dtype in dtypes}
    return {dtype: peak for dtype, peak in found.items() if peak is not None}


def calibrated(
    timer: Timer, known: Hardware, ranks: int, seconds: float, dtypes: Sequence[str], peaks: Mapping[str, float]
) -> Calibration:
    """Calibrate `known` by the timer."""
    found, spreads, left_out = Timings(), [], []
    for dtype in dtypes:
        roofline = timer.roofline(getattr(torch, dtype))
        found.flops[dtype] = roofline.flops_per_second
        found.bandwidth = max(roofline.bytes_per_second, 0.0 if math.isnan(found.bandwidth) else found.bandwidth)
    sizes = SIZES[known.device]
    for dtype in dtypes:
        budget = SHARES["operators"] * seconds / len(dtypes)
        listed = operators(known, sizes, [getattr(torch, dtype)])
        calls = dict(_that_fit(listed, found, found.flops[dtype], budget))
        left_out += sorted({cost.name for call, cost in listed.items() if call not in calls and cost.nbytes < 2**12})
        for cost, times in zip(calls.values(), timer.operators(calls, budget), strict=True):
            if times and median(times) > 0:
                found.operators.append((cost, median(times)))
                spreads.append(_spread(times))
            else:
                left_out.append(cost.name)
    if ranks > 1:
        sent = collectives(known, sizes, ranks)
        for (name, nbytes), each in zip(
            sent.values(), timer.collectives(sent, SHARES["collectives"] * seconds), strict=True
        ):
            found.collectives.append((name, ranks, nbytes, each))
    on = hardware_of(known, peaks, found)
    points = len(found.operators) + len(found.collectives)
    return Calibration(_launching(on, timer), points, spreads, list(dict.fromkeys(left_out)))


def _that_fit(calls: Mapping[Call, Cost], found: Timings, flops: float, budget: float) -> Iterator[tuple[Call, Cost]]:
    """The calls whose rounds fit into the budget, the shortest first."""

    def expected(cost: Cost) -> float:
        return SLOWER * max(cost.flops / flops, cost.nbytes / found.bandwidth) + 1e-5

    total = 0.0
    for call, cost in sorted(calls.items(), key=lambda each: expected(each[1])):
        total += ROUNDS * expected(cost)
        if total > budget:
            return
        yield call, cost


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    quarter, middle, three = quantiles(times, n=4)
    return (three - quarter) / middle


def _launching(on: Hardware, timer: Timer) -> Hardware:
    """The hardware with the host's seconds for a launch, so that a known program takes what it was measured to take."""
    rates = rates_of(on)
    assert rates is not None
    parts: dict[str, tuple[float, int]] = {}
    computing, launches = 0.0, 0
    for event in events_of(small_plan("cpu"), on):
        launches += event.launches
        computing += rates.seconds(event.cost) if event.cost is not None else 0.0
        if event.name and event.call is None:  # a part of the step ends
            parts[event.name] = computing, launches
            computing, launches = 0.0, 0
    laps = timer.small_steps()
    on_host = on.device == "cpu"
    forward, backward = (
        per_launch([lap.parts[part] for lap in laps], *parts[part], on_host) for part in ("forward", "backward")
    )
    return with_launches(on, forward, backward)


def small_plan(device: str) -> Plan:
    """The plan of the known program."""
    return Plan(Small, cast(Implementation, None), None, None, device, 1)


class OnRanks:
    """Times on ranks of this machine, all of which compute at once."""

    def __init__(self, worlds: Worlds, ranks: int) -> None:
        self.worlds, self.ranks = worlds, ranks

    def _run(self, function: Any, *args: Any) -> list[Any]:
        return self.worlds.get(self.ranks).run(function, *args)

    def roofline(self, dtype: torch.dtype) -> Roofline:
        found = self._run(measure_roofline, self.worlds.device, dtype)
        return min(found, key=lambda each: each.flops_per_second)

    def operators(self, calls: Mapping[Call, Cost], budget: float) -> list[list[float]]:
        by_rank = self._run(operator_times, list(calls), budget, self.worlds.device, 0, NO_KERNEL)
        return [max(each, key=lambda times: median(times or [0.0])) for each in zip(*by_rank, strict=True)]

    def collectives(self, calls: Mapping[Call, tuple[str, int]], budget: float) -> list[float]:
        by_rank = self._run(collective_seconds, list(calls), budget, self.worlds.device)
        return [max(sent.launch + sent.alone for sent in each) for each in zip(*by_rank, strict=True)]

    def small_steps(self) -> list[Laps]:
        [steps] = self.worlds.get(1).run(step_laps, small_plan(self.worlds.device), STEPS)
        if self.worlds.device == "cuda":
            return [laps for laps, _ in steps[STEPS // 6 :]]
        # Without the time that other processes had the core.
        return [laps.at_pace(laps.seconds / (laps.seconds - waited)) for laps, waited in steps[STEPS // 6 :]]


@cache
def this_gpu() -> Hardware:
    """This machine's GPU, calibrated for a minute: what `this` stands for where CUDA works."""
    found = calibrate("cuda", 1, 1.0, ("bfloat16", "float32"))
    return replace(found.hardware, name=THIS)
