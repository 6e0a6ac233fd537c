"""Triton kernels of attention, each configuration: accurate in the interpreter; compiled without spills."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

from correctness.attention.accuracy import assert_as_accurate_as_eager, random_inputs, results
from correctness.attention.compiling import ARITHMETIC, compile_tile
from correctness.support.compiling import kernel_row
from correctness.support.kernel_faults import every_fourth, with_fault
from impl.attention import FlashAttentionTriton, as_attention, flash_triton, triton_configurations, triton_kernels
from impl.attention.triton_configurations import CHIPS, HALF, TABLES, Tile, configuration, nearest_arithmetic, tiles
from shardmark.api import family
from shardmark.meter.aot import SHARED_MEMORY, KernelReport

pytestmark = pytest.mark.usefixtures("poisoned")

COLUMNS = (16, 32, 64, 128)
DTYPES = {HALF: torch.float16, "ieee": torch.float32, "tf32x3": torch.float32, "tf32": torch.float32}

Case = tuple[str, str, int, int, Tile]
"""Kernel, arithmetic, chip, columns, tile."""


def _name(case: Case) -> str:
    kernel, arithmetic, chip, columns, tile = case
    return f"{kernel.removeprefix('attention_')}-{arithmetic}-sm_{chip}-d{columns}-{'x'.join(map(str, tile))}"


EACH_TILE_AND_COLUMNS: list[Case] = [
    (kernel, arithmetic, chip, columns, tile)
    for chip, by_arithmetic in TABLES.items()
    for arithmetic, by_kernel in by_arithmetic.items()
    for kernel in by_kernel
    for columns in COLUMNS
    for tile in tiles(kernel, arithmetic, chip, columns)
]
EACH_TILE = [case for case in EACH_TILE_AND_COLUMNS if case[3] in TABLES[case[2]][case[1]][case[0]]]
"""Each tile once, with the most columns that it is used for."""


@pytest.fixture
def flash(device: str) -> Iterator[Any]:
    """`flash_triton` if it runs here; its kernels are tuned anew before and after."""
    if reason := family("attention").implementations["flash_triton"].unavailable_reason(device):
        pytest.skip(reason)
    flash_triton._tuned.cache_clear()
    yield as_attention(FlashAttentionTriton)
    flash_triton._tuned.cache_clear()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.sweep
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", EACH_TILE, ids=_name)
def test_each_configuration_is_as_accurate_as_eager(
    case: Case, is_causal: bool, flash: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Sizes slightly above multiples of the tile: full, partial and masked tiles all occur."""
    kernel, arithmetic, chip, columns, tile = case
    if device == "cuda" and chip != flash_triton.chip_of(torch.device(device)):
        pytest.skip(f"for sm_{chip}, and this device is another")
    monkeypatch.setattr(flash_triton, "chip_of", lambda device: chip)
    monkeypatch.setitem(TABLES[chip][arithmetic][kernel], columns, [tile])
    torch.set_float32_matmul_precision(ARITHMETIC[arithmetic])
    # The interpreter is slow; on a GPU the pipeline must run several rounds, over several heads and groups.
    whole, q_heads, k_heads = (5, 4, 2) if device == "cuda" else (1, 1, 1)
    for head_dim in (columns, columns - 8) if device == "cuda" else (columns - 8,):
        q_shape, k_shape = (
            (2, heads, whole * block + more, head_dim)
            for heads, block, more in ((q_heads, tile[0], 5), (k_heads, tile[1], 3))
        )
        inputs = random_inputs(q_shape, k_shape, DTYPES[arithmetic], device)
        assert_as_accurate_as_eager(flash, inputs, is_causal)


FAULTS = {  # text in the kernels' source, and its faulty replacement
    "mask one key too far": ("columns <= rows", "columns <= rows + 1"),
    "mask one key too near": ("columns <= rows", "columns < rows"),
    "no mask backward": ("seen = seen & (columns[:, None] <= rows[None, :])", "pass"),
    "last tile of keys skipped": ("BLOCK_N * BLOCK_N, k_len\n", "BLOCK_N * BLOCK_N, k_len // BLOCK_N * BLOCK_N\n"),
    "first tile of keys skipped": ("end if MASKED else first_masked,", "end if MASKED else first_masked - BLOCK_N,"),
    "diagonal tile of queries skipped": ("first_tile = start // BLOCK_M", "first_tile = start // BLOCK_M + 1"),
    "last tile of queries skipped": ("tl.maximum(tiles - whole, 0)", "0"),
    "output not written": ("_store(out, acc", "_store(q, acc"),
    "last row not written": ("batch, kv_head, start, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)\n    _store", "batch, kv_head, start, k_len - 1, TMA, BLOCK_N, HEAD_DIM, COLUMNS)\n    _store"),  # noqa: E501
    "gradient left as it was": ("_store(grad_q, acc", "_store(out, acc"),
    "sums not rescaled": ("acc * rescale[:, None]", "acc"),
    "delta forgotten": ("grad_probs - row_delta[:, None]", "grad_probs"),
    "last head of a group skipped": ("(kv_head + 1) * group)", "(kv_head + 1) * group - 1)"),
    "no gradient of q": ("_store(grad_q, acc * (scale", "_store(grad_q, 0 * acc * (scale"),
    "no gradient of k": ("_store(grad_k, acc_k * (scale", "_store(grad_k, 0 * acc_k * (scale"),
    "gradient of k a twentieth short": ("_store(grad_k, acc_k * (scale", "_store(grad_k, 0.95 * acc_k * (scale"),
    "log-sum-exp a hundredth off": ("tl.log2(row_sum)) * LN_2", "tl.log2(row_sum)) * LN_2 * 1.01"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *every_fourth(FAULTS)])
def test_a_planted_fault_is_caught(
    fault: str | None, flash: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """The accuracy check must fail on a kernel with a planted fault; outputs are NaN until written."""
    small = {kernel: {128: [(16, 16, 4, 2)]} for kernel in TABLES[80][HALF]}
    monkeypatch.setattr(triton_configurations, "TABLES", {80: {HALF: small}})
    monkeypatch.setattr(flash_triton, "chip_of", lambda device: 80)
    if fault is not None:
        monkeypatch.setattr(flash_triton, "triton_kernels", with_fault(triton_kernels, tmp_path, *FAULTS[fault]))
    inputs = random_inputs((4, 40, 16), (2, 37, 16), torch.float16, device)
    with nullcontext() if fault is None else pytest.raises(AssertionError, match="error"):
        assert_as_accurate_as_eager(flash, inputs, is_causal=True)


def _assert_sound(case: Case, report: KernelReport) -> None:
    """Assert no spills, shared memory within the chip's limit, and use of its matrix unit."""
    _, arithmetic, chip, _, _ = case
    assert report.spilled_bytes == 0, f"{report.spilled_bytes} bytes a thread are spilled"
    limit = SHARED_MEMORY[chip]
    assert report.shared_bytes <= limit, f"{report.shared_bytes} bytes of shared memory, of {limit}"
    if arithmetic == "ieee":
        assert not report.matrix_instructions and report.instructions["FFMA"]
    else:
        assert report.matrix_instructions, f"no matrix instruction among {report.instructions.most_common(5)}"


@pytest.mark.sweep
@pytest.mark.parametrize("case", EACH_TILE_AND_COLUMNS, ids=_name)
def test_each_configuration_compiles_soundly(
    case: Case, compiling: ProcessPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    report = compiling.submit(compile_tile, *case).result()
    record_property("kernel", kernel_row(_name(case), report))
    _assert_sound(case, report)


FIRST_ON_HOPPER = [
    (kernel, arithmetic, 90, 64, tiles(kernel, arithmetic, 90, 64)[0])
    for kernel in TABLES[90][HALF]
    for arithmetic in (HALF, "ieee")
]


@pytest.mark.parametrize("case", FIRST_ON_HOPPER, ids=_name)
def test_the_first_configurations_compile_soundly_for_hopper(case: Case, compiling: ProcessPoolExecutor) -> None:
    report = compiling.submit(compile_tile, *case).result()
    _assert_sound(case, report)
    kernel, arithmetic, _, columns, tile = case
    if arithmetic == HALF:  # the estimate that prunes configurations is close to the real use
        q = torch.empty(1, 1, 1, columns, dtype=torch.bfloat16)
        names = getattr(triton_kernels, kernel).arg_names
        arguments = {**dict.fromkeys(names, q), "q": (q, 0, 0, 0), "COLUMNS": columns}
        assert triton_configurations.tile_bytes(configuration(tile, HALF), arguments) == pytest.approx(
            report.shared_bytes, rel=0.05
        )


READABLE = {
    "contiguous": (lambda x: x, True),
    "heads_inside": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "columns_apart": (lambda x: x[..., ::2], False),
    "odd_offset": (lambda x: x[..., 1:33], False),
    "odd_rows": (lambda x: x[..., :33].contiguous()[..., :32], False),
    "expanded": (lambda x: x[:, :1].expand(-1, 3, -1, -1), False),
    "one_row": (lambda x: x[:, :, :1], True),
}


@pytest.mark.parametrize("view", READABLE)
def test_what_a_tensor_descriptor_cannot_read_is_known(view: str) -> None:
    make, readable = READABLE[view]
    assert flash_triton.is_readable(make(torch.zeros(2, 3, 40, 64, dtype=torch.float16))) == readable


Launch = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The kernel, its autotuner's key, and its arguments."""


@pytest.fixture
def launches(flash: Any, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record the launches in order."""
    found: list[Launch] = []
    tuned = flash_triton._tuned

    def listening(kernel: str, *sizes: Any) -> Any:
        autotuner = tuned(kernel, *sizes)

        def launcher(grid: Any) -> Callable[..., None]:
            def launch(**arguments: Any) -> None:
                found.append((kernel, tuple(arguments[name] for name in autotuner.keys), arguments))
                autotuner[grid](**arguments)

            return launch

        return MagicMock(__getitem__=lambda _, grid: launcher(grid))

    monkeypatch.setattr(flash_triton, "_tuned", listening)
    return found


def _keys(launches: list[Launch], q: tuple[int, ...], k: tuple[int, ...], flash: Any, device: str) -> dict[str, Any]:
    """Autotuner keys by kernel, for a forward and a backward of those shapes."""
    launches.clear()
    results(flash, random_inputs(q, k, torch.float32, device), is_causal=False)
    return {kernel: key for kernel, key, _ in launches}


def test_the_autotuner_sees_how_many_programs_there_are(flash: Any, launches: list[Launch], device: str) -> None:
    one, eight, other_eight = (
        _keys(launches, (*leading, 32, 16), (*leading, 32, 16), flash, device) for leading in ((1, 1), (1, 8), (4, 2))
    )
    assert len(one) == 3 and eight == other_eight
    assert all(one[kernel] != eight[kernel] for kernel in one)
    few_keys, many_keys = (_keys(launches, (32, 16), (length, 16), flash, device) for length in (32, 256))
    assert few_keys["attention_forward"] == many_keys["attention_forward"]  # one program per block of queries
    assert few_keys["attention_backward_kv"] != many_keys["attention_backward_kv"]  # one program per block of keys


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
    "odd_rows": lambda x: torch.cat([x, x[..., :1]], dim=-1)[..., :-1],
    "heads_inside": lambda x: torch.cat([x.transpose(1, 2)] * 3, dim=-1)[..., 1:17].transpose(1, 2),
    "one_for_all_heads": lambda x: torch.cat([x[:, :1], x[:, :1, :, :1]], dim=-1)[..., 1:].expand_as(x),
}


@pytest.mark.parametrize("how", ODD)
def test_odd_strides_reach_the_kernels_that_read_by_pointers(
    how: str, flash: Any, launches: list[Launch], device: str
) -> None:
    """A copy would be dense: kernels would never see such strides, and memory would exceed the formula."""
    inputs = [ODD[how](x) for x in random_inputs((2, 3, 33, 16), (2, 3, 40, 16), torch.float32, device)]
    assert_as_accurate_as_eager(flash, inputs, is_causal=True)
    wanted = {name: (x.data_ptr(), *x.stride()[:3]) for name, x in zip("qkv", inputs, strict=False)}
    for kernel, _, arguments in launches:
        found = {name: (arguments[name][0].data_ptr(), *arguments[name][1:]) for name in "qkv"}
        assert found == wanted, f"{kernel} reads a copy"
        if "grad_out" in arguments:
            assert arguments["grad_out"][1:] == inputs[3].stride()[:3], f"{kernel} reads a copy of the gradient"


def test_what_spills_or_misses_the_matrix_unit_is_told(compiling: ProcessPoolExecutor) -> None:
    spills = ("attention_forward", HALF, 90, 128, (128, 128, 4, 2))
    with pytest.raises(AssertionError, match=r"bytes a thread are spilled"):
        _assert_sound(spills, compiling.submit(compile_tile, *spills).result())
    no_wgmma = ("attention_backward_kv", HALF, 90, 64, (64, 32, 4, 2))
    with pytest.raises(AssertionError, match="no matrix instruction"):
        _assert_sound(no_wgmma, compiling.submit(compile_tile, *no_wgmma).result())


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_has_tiles_for_every_precision(chip: int, columns: int) -> None:
    for kernel in TABLES[chip][HALF]:
        for wanted in (HALF, "tf32", "tf32x3", "ieee"):
            found = nearest_arithmetic(kernel, wanted, chip, columns)
            assert found == wanted or (wanted, found) in {("tf32", "tf32x3"), ("tf32", "ieee"), ("tf32x3", "ieee")}


@pytest.mark.parametrize(("room", "kept"), [(10**9, 2), (100_000, 1), (10, 1)])
def test_configurations_that_do_not_fit_in_shared_memory_are_not_tried(
    room: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = (configuration(tile, HALF) for tile in ((128, 128, 8, 2), (64, 32, 4, 2)))
    monkeypatch.setattr(triton_configurations, "shared_memory", lambda device: room)
    q = torch.empty(1, 1, 256, 128, dtype=torch.bfloat16)
    arguments = {"q": (q, 0, 0, 128), "lse": q, "COLUMNS": 128}
    assert triton_configurations.prune([large, small], {}, **arguments) == [large, small][-kept:]


def test_float32_products_follow_the_precision_that_is_set(flash: Any, device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter computes every product in float32; what is compiled is checked above")
    inputs = random_inputs((2, 200, 64), (2, 200, 64), torch.float32, device)
    exact = results(as_attention(flash), [x.double() for x in inputs], is_causal=True)["out"]
    errors = {}
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        found = results(flash, inputs, is_causal=True)["out"]
        errors[precision] = (found.double() - exact).abs().max().item()
    assert max(errors["highest"], errors["high"]) <= 1e-5 < errors["medium"]


@pytest.mark.parametrize(("setting", "wanted"), [("ieee", "ieee"), ("tf32", "tf32")])
def test_pytorchs_newer_precision_setting_is_followed_too(setting: str, wanted: str) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = setting
        assert flash_triton.float32_arithmetic() == wanted
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
