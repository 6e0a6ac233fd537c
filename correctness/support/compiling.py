"""A process that compiles Triton's kernels, for attention, layers, loss and optim.

In the tests' own process Triton's interpreter stands in for the GPU; this process has Triton without it. Triton reads
that setting when it is imported, so functions submitted to it import Triton and their modules do not.
"""

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable
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


def compiled(chip: int, launch: Callable[[], object]) -> list[tuple[Any, Counter[int]]]:
    """The `KernelReport` of each kernel that `launch` would launch on the chip, and its `accesses`."""
    from shardmark.meter import aot

    machine_code: list[str] = []
    cuobjdump = aot._cuobjdump

    def listened(option: str, path: str) -> str:
        found = cuobjdump(option, path)
        if "sass" in option:
            machine_code.append(found)
        return found

    aot._cuobjdump = listened
    try:
        with aot.compile_only(chip) as reports:
            launch()
    finally:
        aot._cuobjdump = cuobjdump
    return list(zip(reports, map(accesses, machine_code), strict=True))


def accesses(machine_code: str) -> Counter[int]:
    """Count accesses to global memory by bits: LDG.E.128 has 128; without a number an access has 32."""
    modifiers = re.findall(r"\b(?:LDG|STG)((?:\.\w+)*)", machine_code)
    widths = (re.search(r"\.[US]?(8|16|64|128|256)\b", found) for found in modifiers)
    return Counter(int(width[1]) if width else 32 for width in widths)


def assert_sound(report: Any) -> None:
    """Assert that the kernel spills no register, and has as much shared memory as the chip."""
    from shardmark.meter.aot import SHARED_MEMORY

    assert report.spilled_bytes == 0, f"{report.spilled_bytes} bytes a thread are spilled"
    assert report.shared_bytes <= SHARED_MEMORY[report.capability]


def assert_wide(accesses: Counter[int]) -> None:
    """Assert that most accesses to global memory have 16 bytes: all but those of single numbers and odd ends."""
    narrow = sum(count for bits, count in accesses.items() if bits < 128)
    assert accesses[128] > narrow, f"{accesses[128]} accesses of 16 bytes, {narrow} of less"


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
