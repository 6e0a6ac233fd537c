"""Compile the fused loss's Triton kernel for a chip, in the process of the fixture `compiling`."""

import re
from collections import Counter
from typing import Any

import torch


def compile_loss(dtype: str, chip: int, smoothed: bool, configuration: tuple[int, int], vocab: int = 50257) -> Any:
    """Return the `KernelReport` of the fused loss's kernel with that block and number of warps, and its `accesses`.
    Rows of logits have the fused loss's stride."""
    from impl.loss import fused_triton
    from impl.loss.accounting import row_stride
    from impl.loss.fused import Terms
    from shardmark.meter import aot

    machine_code: list[str] = []
    cuobjdump = aot._cuobjdump

    def listened(option: str, path: str) -> str:
        machine_code.append(cuobjdump(option, path))
        return machine_code[-1]

    fused_triton.configuration = lambda vocab: configuration
    element = getattr(torch, dtype)
    logits = torch.empty(4, row_stride(vocab, element.itemsize), dtype=element)[:, :vocab]
    aot._cuobjdump = listened
    try:
        with aot.compile_only(chip) as reports:
            terms = Terms(-100, 0.1 if smoothed else 0.0, 1e-4)
            fused_triton.to_gradients(logits, torch.zeros(4, dtype=torch.int64), terms, True)
    finally:
        aot._cuobjdump = cuobjdump
    (report,) = reports
    return report, accesses(machine_code[-1])


def accesses(machine_code: str) -> Counter[int]:
    """Count accesses to global memory by bits: LDG.E.128 has 128; without a number an access has 32."""
    modifiers = re.findall(r"\b(?:LDG|STG)((?:\.\w+)*)", machine_code)
    widths = (re.search(r"\.[US]?(8|16|64|128|256)\b", found) for found in modifiers)
    return Counter(int(width[1]) if width else 32 for width in widths)
