"""The Triton kernel of the fused loss, one configuration at a time: right in the interpreter, no spills when
compiled."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", exc_type=ImportError)

from correctness.loss.compiling import compile_loss
from correctness.support.compiling import assert_sound, assert_wide, kernel_row
from correctness.support.kernel_faults import every_fourth, with_fault
from impl.loss import fused_pytorch, fused_triton, triton_kernels
from impl.loss.fused import Terms
from impl.loss.fused_triton import CONFIGURATIONS
from shardmark.api import family
from shardmark.meter.aot import SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("poisoned")

TERMS = {"plain": Terms(-100, 0.0, 0.0), "label_smoothing": Terms(-100, 0.1, 0.0), "everything": Terms(2, 0.1, 1e-2)}


@pytest.fixture
def _runs(device: str) -> None:
    if reason := family("loss").implementations["fused_triton"].unavailable_reason(device):
        pytest.skip(reason)


def _chunk(rows: int, vocab: int, dtype: torch.dtype, device: str, ignored: int) -> tuple[Tensor, Tensor]:
    """Logits with a row stride above the vocabulary, NaN between the rows, and targets."""
    buffer = torch.full((rows, vocab + 7), torch.nan, dtype=dtype, device=device)
    buffer[:, :vocab] = torch.randn(rows, vocab, device=device)
    targets = torch.randint(vocab, (rows,), device=device)
    targets[0], targets[1] = vocab - 1, ignored
    return buffer[:, :vocab], targets


def _assert_right(rows: int, vocab: int, dtype: torch.dtype, terms: Terms, device: str) -> None:
    """Compare with PyTorch operators in float64, within one rounding to the logits' dtype and those of float32."""
    logits, targets = _chunk(rows, vocab, dtype, device, terms.ignore_index)
    exact, rest = logits.double(), logits.as_strided((rows, 7), logits.stride(), vocab)
    wanted = fused_pytorch.to_gradients(exact, targets, terms, True)  # overwrites `exact` with its gradients
    loss = fused_triton.to_gradients(logits, targets, terms, True)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.double(), exact, rtol=max(eps, 1e-5), atol=1e-7)
    assert rest.isnan().all()


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: "x".join(map(str, c)))
def test_each_configuration_is_right(
    configuration: tuple[int, int], terms: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Rows shorter than a block, as long as one, one column longer, and of several blocks."""
    monkeypatch.setattr(fused_triton, "configuration", lambda vocab: configuration)
    block = configuration[0]
    for vocab in (3, block, block + 1, 2 * block + 5):
        _assert_right(3, vocab, dtype, TERMS[terms], device)


@pytest.mark.usefixtures("_runs")
def test_without_gradients_the_logits_stay(device: str) -> None:
    logits, targets = _chunk(3, 97, torch.float32, device, -100)
    before = logits.clone()
    wanted = fused_pytorch.to_gradients(logits.double(), targets, TERMS["plain"], False)
    loss = fused_triton.to_gradients(logits, targets, TERMS["plain"], False)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


FAULTS = {  # text in the kernel's source, and its faulty replacement
    "last block skipped": ("tl.range(0, end, BLOCK)", "tl.range(0, end - BLOCK, BLOCK)"),
    "rest of a row not summed": ("largest, exponentials, total = _add(start, rest", "_ = _add(start, rest"),
    "rest of a row left": ("            _to_gradients(start, rest, vocab, target, largest, factor, smoothing, vocab, SMOOTHED)", ""),  # noqa: E501
    "rest of an ignored row left": ("            _store_zeros(start, rest, vocab)", ""),
    "sum not rescaled": ("exponentials * tl.exp(largest - new_largest)", "exponentials"),
    "beyond the vocabulary counted": ('other=float("-inf")', "other=0.0"),
    "beyond the vocabulary written": ("gradient.to(start.dtype.element_ty), mask=inside", "gradient.to(start.dtype.element_ty), mask=columns <= end"),  # noqa: E501
    "target off by one": ("columns == target,", "columns == target + 1,"),
    "smoothing of the target forgotten": ("target, 1 - smoothing, 0.0", "target, 1, 0.0"),
    "smoothing of the others forgotten": ("gradient -= smoothing / vocab", "pass"),
    "mean of the logits forgotten": ("loss += smoothing * (largest - origin - total / vocab)", "pass"),
    "z-loss's gradient halved": ("1 + 2 * z_loss", "1 + z_loss"),
    "z-loss forgotten": (" + z_loss * lse * lse", ""),
    "ignored rows left": ("if target == ignore_index:", "if target == ignore_index - 1:"),
    "ignored rows not zero": ("tl.zeros(columns.shape", "1 + tl.zeros(columns.shape"),
    "ignored losses counted": ("tl.store(losses + row, 0.0)", "tl.store(losses + row, 1.0)"),
}  # fmt: skip


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("fault", every_fourth(FAULTS))
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    module = with_fault(triton_kernels, tmp_path, *FAULTS[fault])
    monkeypatch.setattr(fused_triton, "triton_kernels", module)
    monkeypatch.setattr(fused_triton, "configuration", lambda vocab: (16, 4))
    with pytest.raises(AssertionError):
        _assert_right_in_five_draws(device)


def _assert_right_in_five_draws(device: str) -> None:
    """Five draws, as a skipped part may sum to little in one draw; so many rows that some have their largest logit
    outside the first block."""
    for _ in range(5):
        _assert_right(30, 41, torch.float32, TERMS["everything"], device)


def test_the_smallest_block_that_holds_a_row_is_taken() -> None:
    vocabularies = (1, 1024, 1025, 8192, 128256)
    assert [fused_triton.configuration(vocab)[0] for vocab in vocabularies] == [1024, 1024, 4096, 8192, 8192]


Case = tuple[str, int, bool, tuple[int, int]]

COMPILED: list[Case] = [
    (dtype, chip, smoothed, configuration)
    for dtype in ("bfloat16", "float16", "float32")
    for chip in SHARED_MEMORY
    for smoothed in (False, True)
    for configuration in CONFIGURATIONS
]


def _name(case: Case) -> str:
    dtype, chip, smoothed, (block, warps) = case
    return f"loss-{dtype}-sm_{chip}-{'smoothed' if smoothed else 'plain'}-{block}x{warps}"


@pytest.mark.sweep
@pytest.mark.parametrize("case", COMPILED, ids=_name)
def test_each_configuration_compiles_soundly(
    case: Case, compiling: ProcessPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    report, accesses = compiling.submit(compile_loss, *case).result()
    record_property("kernel", kernel_row(_name(case), report))
    assert_sound(report)
    if case[0] != "float32":  # their row stride is the vocabulary, here an odd number
        assert_wide(accesses)


@pytest.mark.parametrize("vocab", [50257, 128256])
def test_the_largest_configuration_compiles_soundly_for_hopper_with_wide_accesses(
    vocab: int, compiling: ProcessPoolExecutor
) -> None:
    report, accesses = compiling.submit(compile_loss, "bfloat16", 90, True, CONFIGURATIONS[-1], vocab).result()
    assert_sound(report)
    assert_wide(accesses)


def test_a_huge_configuration_is_told(compiling: ProcessPoolExecutor) -> None:
    report, _ = compiling.submit(compile_loss, "bfloat16", 90, True, (8192, 1)).result()
    with pytest.raises(AssertionError, match="bytes a thread are spilled"):
        assert_sound(report)


def test_narrow_accesses_are_told(compiling: ProcessPoolExecutor) -> None:
    """The check finds narrow accesses: rows of float32 with an odd stride."""
    _, accesses = compiling.submit(compile_loss, "float32", 90, True, CONFIGURATIONS[0]).result()
    with pytest.raises(AssertionError, match=r"0 accesses of 16 bytes, \d+ of less"):
        assert_wide(accesses)
