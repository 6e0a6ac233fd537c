"""The work of one step of a case: FLOPs, and bytes moved and communicated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The work of one step, summed over all ranks: floating-point operations, and bytes it must read and write.

    `bytes_communicated` is the bytes that each rank must send, by theory. `model_flops`, for MFU, is the model's own
    FLOPs without recomputation; 0 where MFU is not asked.
    """

    flops: int = 0
    bytes_moved: int = 0
    bytes_communicated: int = 0
    model_flops: int = 0
