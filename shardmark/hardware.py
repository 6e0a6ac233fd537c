"""What this machine can do, and so the least time that work can take: the roofline.

The two rates are measured here, in the run itself, with the plainest code that reaches them: one large matrix product
and one large copy (Williams, Waterman, Patterson, "Roofline", CACM 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardmark.cases import Work
from shardmark.clock import Stopwatch
from shardmark.memory import release


@dataclass(frozen=True)
class Roofline:
    """Rates of the whole machine on CPU, of one device on CUDA."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, work: Work) -> float:
        """The least time that the work takes: whichever of arithmetic and memory traffic is slower."""
        return max(work.flops / self.flops_per_second, work.bytes_moved / self.bytes_per_second)


def measure_roofline(device: str, dtype: torch.dtype) -> Roofline:
    """Measure both rates on `device`: the best of a few repetitions, as a limit should be."""
    rates = _rates(device, dtype)
    release(device)
    return rates


def _rates(device: str, dtype: torch.dtype) -> Roofline:
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.empty(2**28 if device == "cuda" else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    matmul = min(_seconds(device, lambda: torch.matmul(a, b)) for _ in range(5))
    copy = min(_seconds(device, lambda: target.copy_(source)) for _ in range(5))
    return Roofline(2 * size**3 / matmul, 2 * source.numel() / copy)  # a copy reads each byte and writes it


def _seconds(device: str, function: Callable[[], object]) -> float:
    watch = Stopwatch(device)
    watch.start()
    function()
    return watch.stop().seconds
