"""Compiling one configuration of a Triton kernel for a chip, in a process of its own.

In the tests' own process Triton's interpreter stands for the GPU; this one has Triton without it. Triton reads that
setting when it is imported, so the functions here import it, and not the file.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from shardmark.api import error_line

ARITHMETIC = {"half": "highest", "ieee": "highest", "tf32x3": "high", "tf32": "medium"}
"""Settings of `torch.set_float32_matmul_precision`, by what they make of float32."""


def compiler() -> ProcessPoolExecutor:
    """A process for `compile_tile` and the others."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_without_interpreter)


def _without_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def unavailable_reason() -> str | None:
    """Why nothing can be compiled here, if so: ptxas does not run, say, or there is no folder to write to."""
    from impl.interpreting import NO_TRITON, double
    from shardmark.meter.aot import compile_only

    if NO_TRITON is not None:
        return NO_TRITON
    try:
        with compile_only(90):
            double[(1,)](torch.ones(3), 3, BLOCK=4)
    except Exception as error:
        return f"Triton does not compile here: {error_line(error)}"
    return None


def compile_tile(kernel: str, arithmetic: str, chip: int, columns: int, tile: tuple[int, int, int, int]) -> Any:
    """The `KernelReport` of a causal `kernel` with that tile."""
    from impl.attention import flash_triton, triton_configurations
    from shardmark.meter.aot import compile_only

    torch.set_float32_matmul_precision(ARITHMETIC[arithmetic])
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    q, k = torch.empty(2, 4, 256, columns, dtype=dtype), torch.empty(2, 2, 256, columns, dtype=dtype)
    lse = torch.empty(q.shape[:-1])
    triton_configurations.TABLES = {chip: {arithmetic: {kernel: {columns: [tile]}}}}
    flash_triton.chip_of = lambda device: chip
    flash_triton._tuned.cache_clear()
    operands = {
        "attention_forward": {"q": q, "k": k, "v": k, "out": q},
        "attention_backward_q": {"q": q, "k": k, "v": k, "out": q, "grad_out": q, "grad_q": q, "delta": lse},
        "attention_backward_kv": {"q": q, "k": k, "v": k, "grad_out": q, "grad_k": k, "grad_v": k, "delta": lse},
    }
    with compile_only(chip) as reports:
        flash_triton._Launch(q, k, is_causal=True)(kernel, lse=lse, **operands[kernel])
    (report,) = reports
    return report


def compile_loss(dtype: str, chip: int, smoothed: bool, configuration: tuple[int, int], vocab: int = 50257) -> Any:
    """The `KernelReport` of the fused loss's kernel with that block and so many warps, and its `accesses`.

    The logits' rows are as far apart as the fused loss has them.
    """
    from impl.loss import fused_triton
    from impl.loss.chunks import row_stride
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
    """How often the code accesses global memory, by bits: LDG.E.128 is one of 128; without a number it is one of 32."""
    modifiers = re.findall(r"\b(?:LDG|STG)((?:\.\w+)*)", machine_code)
    widths = (re.search(r"\.[US]?(8|16|64|128|256)\b", found) for found in modifiers)
    return Counter(int(width[1]) if width else 32 for width in widths)
