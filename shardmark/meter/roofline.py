"""The roofline: this machine's measured rates, the least time that work takes at them, and its published peak.

Both rates are measured in the run itself, with the simplest code that reaches them: one large matrix product and one
large copy (Williams, Waterman, Patterson, "Roofline", CACM 2009).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardmark.api.work import Work
from shardmark.meter.clock import Stopwatch
from shardmark.meter.hardware import hardware
from shardmark.meter.memory import release


@dataclass(frozen=True)
class Roofline:
    """FLOP/s and bytes/s of the whole machine on CPU, of one device on CUDA."""

    flops_per_second: float
    """As measured. Without a published peak, the rate of a dtype narrower than float32 is at least that of float32: a
    machine without fast arithmetic in the dtype, such as a CPU in float16, may convert and must not exceed 100%."""
    bytes_per_second: float
    peak_flops_per_second: float
    """The denominator of MFU: the chip's published dense peak where it is known, else `flops_per_second`."""

    def seconds(self, work: Work) -> float:
        """The least seconds of the work: its arithmetic's or its memory traffic's, whichever takes longer."""
        return max(work.flops / self.flops_per_second, work.bytes_moved / self.bytes_per_second)


PEAK_FLOPS = {
    "GB200": hardware("gb200").flops,
    "B200": hardware("b200").flops,
    "GH200": hardware("h100-80gb").flops,  # its GPU
    "H200 NVL": {"float16": 835.5e12, "bfloat16": 835.5e12, "tf32": 417.5e12, "float32": 60e12},
    "H200": hardware("h200").flops,
    "H100 NVL": {"float16": 835.5e12, "bfloat16": 835.5e12, "tf32": 417.5e12, "float32": 60e12},
    "H100 PCIe": hardware("h100-pcie").flops,
    "H100": hardware("h100-80gb").flops,
    "A100": hardware("a100-80gb").flops,
    "V100": hardware("v100-32gb").flops,
    "RTX 4090": hardware("rtx-4090").flops,
    "MI300X": hardware("mi300x").flops,
    "L40S": {"float16": 362.05e12, "bfloat16": 362.05e12, "tf32": 183e12, "float32": 91.6e12},
    "L40": {"float16": 181.05e12, "bfloat16": 181.05e12, "tf32": 90.5e12, "float32": 90.5e12},
    "L4": {"float16": 121e12, "bfloat16": 121e12, "tf32": 60e12, "float32": 30.3e12},
}
"""Dense FLOP/s on the makers' data sheets, by words of the device's name; the first match counts."""


def published_peak(name: str, dtype: torch.dtype) -> float | None:
    """The published dense FLOP/s of the device of that name. None for an unknown device, and for a part of one (MIG).

    Matrix products in float32 count as tf32 if `torch.set_float32_matmul_precision` allows it.
    """
    for part, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{part}\b", name) and "MIG" not in name:
            narrow = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and "tf32" in flops
            return flops.get("tf32" if narrow else str(dtype).removeprefix("torch."))
    return None


ENOUGH = 1.0
"""No repetition starts after this many seconds, if there are two."""


def measure_roofline(device: str, dtype: torch.dtype) -> Roofline:
    """Measure both rates on `device`: the best of a few repetitions, as a limit should be."""
    rates = _rates(device, dtype)
    release(device)
    return rates


def _rates(device: str, dtype: torch.dtype) -> Roofline:
    # On CUDA the copy is so large that the few microseconds of a launch do not count.
    source = torch.empty(2**31 if device == "cuda" else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = _fastest(device, lambda: target.copy_(source))
    flops = _products_rate(device, dtype)
    peak = published_peak(torch.cuda.get_device_name(), dtype) if device == "cuda" else None
    if peak is None and dtype.itemsize < torch.float32.itemsize:
        flops = max(flops, _products_rate(device, torch.float32))
    return Roofline(flops, 2 * source.numel() / copy, peak or flops)  # a copy reads each byte and writes it


def attainable_flops(device: str, dtype: torch.dtype) -> float:
    """Upper bound of FLOP/s in `dtype` on `device`: the rate of products in it, or in float32, to which code may
    convert.

    On CPU it is at least one thread's rate, by its CPU seconds, times the number of threads: other processes on the
    cores lengthen a product, but not its CPU seconds.
    """
    rates = max(_products_rate(device, each) for each in {dtype, torch.float32})
    if device == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            alone = max(_products_rate(device, each, _cpu_seconds) for each in {dtype, torch.float32})
        finally:
            torch.set_num_threads(threads)
        rates = max(rates, threads * alone)
    release(device)
    return rates


def _seconds(device: str, function: Callable[[], object]) -> float:
    watch = Stopwatch(device)
    watch.start()
    function()
    return watch.stop().seconds


def _cpu_seconds(device: str, function: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


Timer = Callable[[str, Callable[[], object]], float]
"""Seconds of the function on the device."""


def _products_rate(device: str, dtype: torch.dtype, timer: Timer = _seconds) -> float:
    """FLOP/s of one large matrix product."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(device, lambda: torch.matmul(a, b), timer)


def _fastest(device: str, function: Callable[[], object], timer: Timer = _seconds) -> float:
    """Seconds of the best of five runs, or of fewer slow ones, such as half precision on a CPU without it."""
    repetitions: list[float] = []
    while len(repetitions) < 5 and (len(repetitions) < 2 or sum(repetitions) < ENOUGH):
        repetitions.append(timer(device, function))
    return min(repetitions)
