"""What one step of a case does: FLOPs, and bytes moved and communicated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one step does on all ranks together: floating-point operations, and bytes it must read and write.

    `bytes_communicated` is what each rank must send, by theory; `model_flops`, where MFU is asked, the FLOPs that the
    model itself takes, without what a technique computes again.
    """

    flops: int = 0
    bytes_moved: int = 0
    bytes_communicated: int = 0
    model_flops: int = 0
