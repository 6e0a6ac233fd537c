"""A process that compiles Triton's kernels, for attention, loss and optim.

In the tests' own process Triton's interpreter stands in for the GPU; this process has Triton without it. Triton reads
that setting when it is imported, so functions submitted to it import Triton and their modules do not.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

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
