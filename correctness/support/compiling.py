"""A process that compiles Triton's kernels, for attention, loss and optim.

In the tests' own process Triton's interpreter stands in for the GPU; this process has Triton without it. Triton reads
that setting when it is imported, so functions submitted to it import Triton and their modules do not.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from shardmark.api import error_line


def compiler() -> ProcessPoolExecutor:
    """Return a process in which Triton compiles."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_without_interpreter)


def _without_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def unavailable_reason() -> str | None:
    """Return why nothing can be compiled here, or None: for example, ptxas does not run, or no folder is writable."""
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


def kernel_row(case: str, report: Any) -> dict[str, object]:
    """One row of the table that the run prints of compiled kernels; `report` is the kernel's `KernelReport`."""
    from shardmark.meter.aot import SHARED_MEMORY

    return {
        "case": case,
        "registers": report.registers,
        "spilled bytes": report.spilled_bytes,
        "shared bytes": report.shared_bytes,
        "of the chip's": f"{report.shared_bytes / SHARED_MEMORY[report.capability]:.0%}",
        "matrix instructions": " ".join(f"{n} {name}" for name, n in report.matrix_instructions.items()),
    }
