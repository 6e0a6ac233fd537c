"""The GPU while a case is timed: clocks, what lowers them, power, temperature, energy. NVML says them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from shardmark.meter.disturbances import HEAT, POWER, SLOWDOWN
from shardmark.ranks.nvml import Device

EVERY = 0.02
"""Seconds between two samples, at least: power and clocks change no faster, and a sample takes some 0.1 ms."""

REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's reasons for clocks, in words (nvml.h, nvmlClocksEventReason)."""

_THROTTLES = {POWER: 0x4 | 0x80, HEAT: 0x20 | 0x40}
_SLOWDOWN = 0x8
"""NVML sets it beside one of the others, or alone where it does not know whether heat or power is the cause."""


@dataclass(frozen=True)
class GpuFigures:
    """One GPU through the timed rounds of a case; None where it does not say.

    Where a GPU is partitioned (MIG), clocks, reasons and temperature are those of all of it; power and energy, which
    its instances have together, are left out.
    """

    sm_clock: float | None = None
    """Median of the samples, in hertz."""
    memory_clock: float | None = None
    reasons: list[str] = field(default_factory=list)
    """Everything that kept clocks from rising, in any sample."""
    throttled: dict[str, float] = field(default_factory=dict)
    """Share of the time in which power or heat lowered the clocks, by disturbance."""
    power: float | None = None
    """Watts on average."""
    temperature: float | None = None
    """The highest, in degrees Celsius."""
    energy: float | None = None
    """Joules of all rounds, the peer's steps among them."""
    shared: bool = False


class GpuWatch:
    """Follows this rank's GPU from now on; on CPU, and where NVML is not there, it does nothing."""

    def __init__(self, device: str) -> None:
        self._gpu = Device.of(torch.cuda.current_device()) if device == "cuda" else None
        self._samples: list[dict[str, Any]] = []
        self._next = 0.0
        if self._gpu is not None:
            self._began, self._before = time.perf_counter(), self._counters(self._gpu)

    def sample(self) -> None:
        """Called between rounds: read the clocks, unless they have been read just now."""
        gpu, now = self._gpu, time.perf_counter()
        if gpu is None or now < self._next:
            return
        nvml, self._next = gpu.nvml, now + EVERY
        reasons = gpu.ask("CurrentClocksEventReasons")
        self._samples.append(
            {
                "sm_clock": gpu.ask("ClockInfo", nvml.NVML_CLOCK_SM),  # MHz
                "memory_clock": gpu.ask("ClockInfo", nvml.NVML_CLOCK_MEM),
                # Drivers before 535 have the older name alone.
                "reasons": gpu.ask("CurrentClocksThrottleReasons") if reasons is None else reasons,
                "temperature": gpu.ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
                "power": gpu.ask("PowerUsage"),  # milliwatts
            }
        )

    def figures(self) -> GpuFigures | None:
        """The figures so far; None without a GPU that NVML knows."""
        gpu = self._gpu
        if gpu is None:
            return None
        elapsed, after = time.perf_counter() - self._began, self._counters(gpu)
        since = {name: _difference(self._before[name], value) for name, value in after.items()}
        shared, reasons = gpu.is_shared, self._seen("reasons")
        # NVML counts every 20 to 100 ms: in a shorter time it may count nothing.
        energy = None if shared or not since["energy"] else since["energy"] / 1e3
        watts = [each / 1e3 for each in self._seen("power")]
        mean = energy / elapsed if energy else (sum(watts) / len(watts) if watts else None)
        return GpuFigures(
            sm_clock=_median_hertz(self._seen("sm_clock")),
            memory_clock=_median_hertz(self._seen("memory_clock")),
            reasons=[words for bit, words in REASONS.items() if any(each & bit for each in reasons)],
            throttled=_throttled(reasons, since, elapsed),
            power=None if shared else mean,
            temperature=max(map(float, self._seen("temperature")), default=None),
            energy=energy,
            shared=shared,
        )

    def _seen(self, name: str) -> list[int]:
        return [each[name] for each in self._samples if each[name] is not None]

    @staticmethod
    def _counters(gpu: Device) -> dict[str, int | None]:
        """Energy so far in millijoules, and nanoseconds so far for which clocks were lowered; None if not counted."""
        policies = {POWER: gpu.nvml.NVML_PERF_POLICY_POWER, HEAT: gpu.nvml.NVML_PERF_POLICY_THERMAL}
        lowered = {name: gpu.ask("ViolationStatus", policy) for name, policy in policies.items()}
        return {
            "energy": gpu.ask("TotalEnergyConsumption"),
            **{name: None if found is None else found.violationTime for name, found in lowered.items()},
        }


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _throttled(reasons: list[int], since: dict[str, int | None], elapsed: float) -> dict[str, float]:
    """Shares of the time by the counters, or of the samples: the larger, as not every GPU counts."""
    shares = {name: _share(reasons, bits) for name, bits in _THROTTLES.items()}
    for name in shares:
        shares[name] = max(shares[name], min(1.0, (since[name] or 0) / 1e9 / elapsed))
    causes = _THROTTLES[POWER] | _THROTTLES[HEAT]
    shares[SLOWDOWN] = _share([each for each in reasons if not each & causes], _SLOWDOWN, len(reasons))
    return {name: share for name, share in shares.items() if share}


def _share(reasons: list[int], bits: int, of: int | None = None) -> float:
    return sum(bool(each & bits) for each in reasons) / max(1, len(reasons) if of is None else of)


def _median_hertz(megahertz: list[int]) -> float | None:
    return median(megahertz) * 1e6 if megahertz else None
