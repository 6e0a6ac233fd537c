"""The Triton kernels of the fused layers: right in the interpreter at block boundaries, no spills when compiled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

from correctness.layers.accuracy import assert_as_accurate_as_eager
from correctness.layers.compiling import compile_layer
from correctness.layers.operations import random_inputs
from correctness.support.compiling import assert_sound, assert_wide, kernel_row
from correctness.support.kernel_faults import every_fourth, with_fault
from impl.layers import OPERATIONS, FusedLayersTriton, fused_triton, triton_kernels
from shardmark.api import family
from shardmark.meter.aot import SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = {"LARGEST": 16, "GATED": 16, "TILE": 16, "PROGRAMS": 3}
"""Blocks and programs so small that few numbers take several of each."""


@pytest.fixture
def _runs(device: str) -> None:
    if reason := family("layers").implementations["fused_triton"].unavailable_reason(device):
        pytest.skip(reason)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(fused_triton, name, value)


def _assert_right(operation: str, dim: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    assert_as_accurate_as_eager(FusedLayersTriton, random_inputs(operation, 7, dim, device, dtype))


@pytest.mark.usefixtures("_runs", "_small")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dim", [3, 16, 17, 37])
def test_several_blocks_and_programs_are_right(dim: int, operation: str, device: str) -> None:
    """Rows shorter than a block, as long as one, one column longer, and of several blocks."""
    _assert_right(operation, dim, device)


FAULTS = {  # operation, text in the kernels' source, and its faulty replacement
    "eps forgotten": ("rms_norm", "/ dim + eps)", "/ dim)"),
    "last block not squared": ("rms_norm", "        squares += value * value", "        squares += tl.where(first + BLOCK < dim, value * value, 0)"),  # noqa: E501
    "mean over the block": ("rms_norm", "tl.sum(squares, 0) / dim", "tl.sum(squares, 0) / BLOCK"),
    "weight of the first block": ("rms_norm", "factor = tl.load(weight + at", "factor = tl.load(weight + at % BLOCK"),
    "mean not subtracted": ("rms_norm", "scale * (given - value * mean)", "scale * given"),
    "mean of one block": ("rms_norm", "if WHOLE else tl.load(means + row)", "if True else tl.load(means + row)"),
    "rows beyond programs left": ("rms_norm", "tl.range(tl.program_id(0), rows, tl.num_programs(0))", "tl.range(tl.program_id(0), tl.num_programs(0))"),  # noqa: E501
    "weight's gradient of the last row": ("rms_norm", "summed += given * value", "summed = given * value"),
    "weight's gradient with weight": ("rms_norm", "summed += given * value", "summed += given * factor * value"),
    "residual forgotten in the second pass": ("add_rms_norm", "        value = _row(x, residual, at, at < dim, ADDS)\n        if ADDS:\n            value = value", "        value = _row(x, residual, at, at < dim, False)\n        if ADDS:\n            value = value"),  # noqa: E501
    "gradient of the sum forgotten": ("add_rms_norm", "result += tl.load(grad_total", "result += 0 * tl.load(grad_total"),  # noqa: E501
    "sum's first row for all": ("add_rms_norm", "tl.store(total + row * dim + at", "tl.store(total + at"),
    "gate's first row for all": ("swiglu", "tl.load(gate + row * stride_gate", "tl.load(gate + 0 * stride_gate"),
    "slope of the sigmoid alone": ("swiglu", "sigmoid * (1 + g * (1 - sigmoid))", "sigmoid * (1 - sigmoid)"),
    "gradients in each other's place": ("swiglu", "(given * g * sigmoid)", "of_gate"),
    "columns beyond a block left": ("swiglu", "tl.store(out + row * dim + at, ", "tl.store(out + row * dim + at % BLOCK, "),  # noqa: E501
    "sine's sign": ("rotary", "even * c - odd * s", "even * c + odd * s"),
    "not turned back": ("rotary", "s = sign * tl.load", "s = tl.load"),
    "angles of position 0": ("rotary", "angle = position * (head_dim // 2) + pair", "angle = pair"),
    "heads beyond a block left": ("rotary", "tl.program_id(1) * HEADS + tl.arange(0, HEADS)", "tl.arange(0, HEADS)"),
    "batch's stride forgotten": ("rotary", "out + batch * out_batch", "out"),
}  # fmt: skip


@pytest.mark.usefixtures("_runs", "_small")
@pytest.mark.parametrize("fault", every_fourth(FAULTS))
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    operation, *texts = FAULTS[fault]
    monkeypatch.setattr(fused_triton, "kernels", with_fault(triton_kernels, tmp_path, *texts))
    with pytest.raises(AssertionError):
        _assert_right_of_small_numbers(operation, device)


def _assert_right_of_small_numbers(operation: str, device: str) -> None:
    """Rows of one block and of several, whose eps counts."""
    for dim in (16, 38):
        inputs = random_inputs(operation, 7, dim, device)
        assert_as_accurate_as_eager(FusedLayersTriton, replace(inputs, eps=0.5))


def _name(case: tuple[str, str, int, int]) -> str:
    operation, dtype, chip, dim = case
    return f"{operation}-{dtype}-sm_{chip}-{dim}"


WIDTHS = (4096, 8192, 16384, 8004)
"""Rows of one block, and of two; of the last no access is aligned."""
COMPILED = [
    (operation, dtype, chip, dim)
    for operation in OPERATIONS
    for dtype in ("bfloat16", "float16", "float32")
    for chip in SHARED_MEMORY
    for dim in (WIDTHS[:1] if operation == "rotary" else WIDTHS)
]


@pytest.mark.sweep
@pytest.mark.parametrize("case", COMPILED, ids=_name)
def test_each_kernel_compiles_soundly(
    case: tuple[str, str, int, int], compiling: ProcessPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    for report, accesses in compiling.submit(compile_layer, *case).result():
        record_property("kernel", kernel_row(f"{_name(case)}-{report.kernel}", report))
        assert_sound(report)
        if case[-1] % 16 == 0:
            assert_wide(accesses)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_compile_soundly_for_hopper_with_wide_accesses(operation: str, compiling: ProcessPoolExecutor) -> None:
    found = compiling.submit(compile_layer, operation, "bfloat16", 90, 4096).result()
    assert [report.kernel for report, _ in found] == {
        "swiglu": ["swiglu_forward", "swiglu_backward"],
        "rotary": ["rotary", "rotary"],
    }.get(operation, ["norm_forward", "norm_backward"])
    for report, accesses in found:
        assert_sound(report)
        assert_wide(accesses)


def test_too_many_elements_a_thread_are_told(compiling: ProcessPoolExecutor) -> None:
    found = compiling.submit(compile_layer, "add_rms_norm", "float32", 90, 8192, 1024).result()
    with pytest.raises(AssertionError, match="bytes a thread are spilled"):
        assert_sound(found[1][0])


def test_narrow_accesses_are_told(compiling: ProcessPoolExecutor) -> None:
    """The check finds narrow accesses: rows of an odd number of columns."""
    (_, accesses), *_ = compiling.submit(compile_layer, "swiglu", "bfloat16", 90, 1023).result()
    with pytest.raises(AssertionError, match=r"0 accesses of 16 bytes, \d+ of less"):
        assert_wide(accesses)
