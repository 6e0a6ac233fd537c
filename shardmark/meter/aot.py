"""Triton kernels compiled ahead of time for a GPU that is not here: registers, spills, shared memory, instructions.

    with compile_only(90) as reports:              # compute capability 9.0
        FlashAttentionTriton.apply(q, k, v, True)  # every kernel it would launch is compiled instead
    reports[0].spilled_bytes, reports[0].matrix_instructions  # 0, {"HGMMA": 32}

Triton's wheel carries ptxas and cuobjdump, so this needs neither a GPU nor the CUDA toolkit. Outputs keep the values
they had. A process in which TRITON_INTERPRET is set cannot do this: it interprets its kernels.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
"""Most bytes of shared memory that one block may have, by capability (CUDA C++ programming guide, table of technical
specifications: 163 KiB and 227 KiB)."""

MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTC.MMA"}
"""Pattern of the instruction that a matrix product of 16-bit or tf32 operands should use, by capability."""


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel: registers and spilled bytes of a thread, and shared memory in bytes."""

    kernel: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Counter[str] = field(repr=False)
    """Count of each instruction in the machine code, by its name before the first dot."""

    @property
    def matrix_instructions(self) -> dict[str, int]:
        """Count of each matrix instruction in the machine code."""
        return {
            name: count
            for name, count in self.instructions.items()
            if re.fullmatch(MATRIX_INSTRUCTION[self.capability], name)
        }


class _Driver:
    """The part of Triton's driver that compiling calls."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return -self._target.arch  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only(capability: int) -> Iterator[list[KernelReport]]:
    """Within the block every Triton launch compiles its kernel for `capability` and does not run it."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    reports: list[KernelReport] = []
    run = JITFunction.run

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        reports.append(_report(compiled, capability))
        return compiled

    active, driver._active = driver._active, _Driver(capability)  # set_active's counterpart asks for a real driver
    JITFunction.run = compile_instead
    try:
        yield reports
    finally:
        JITFunction.run = run
        driver._active = active


def _report(compiled: Any, capability: int) -> KernelReport:
    """Read the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("--dump-sass", file.name)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    instructions = Counter(re.findall(r"^\s+/\*\w{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", code, flags=re.MULTILINE))
    return KernelReport(
        compiled.metadata.name, capability, found["REG"], found["STACK"], compiled.metadata.shared, instructions
    )


def _cuobjdump(option: str, path: str) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
