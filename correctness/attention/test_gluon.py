"""Gluon kernels of attention, compiled for Hopper. `test_attention` checks their results, on a GPU."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton", exc_type=ImportError)

from correctness.attention.compiling import compile_step
from correctness.support.compiling import kernel_row
from impl.attention.flash_gluon import HEAD_DIMS, HOPPER
from shardmark.meter.aot import SHARED_MEMORY

SPILLED = 16
"""Most bytes of registers that a thread may spill outside of the loops."""


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernels_compile_for_hopper(
    head_dim: int, is_causal: bool, compiling: ProcessPoolExecutor, record_property: Any
) -> None:
    """Products are asynchronous: each has its own matrix instructions, and registers hold what is under way."""
    reports = {each.kernel: each for each in compiling.submit(compile_step, head_dim, is_causal).result()}
    assert list(reports) == ["gluon_forward", "prepare", "gluon_backward", "finish"]
    for name, report in reports.items():
        record_property("kernel", kernel_row(f"{name}-sm_{HOPPER}-d{head_dim}", report))
        assert report.spilled_bytes <= SPILLED, f"{name}: {report.spilled_bytes} bytes a thread are spilled"
        assert report.shared_bytes <= SHARED_MEMORY[HOPPER], f"{name}: {report.shared_bytes} bytes of shared memory"
    for name in ("gluon_forward", "gluon_backward"):
        assert reports[name].matrix_instructions, f"{name} has no matrix instruction"
