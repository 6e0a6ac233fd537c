"""Every implementation against float64: results and gradients, sizes, strides, dtypes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness.engine.examples import one_beyond_tiles
from correctness.engine.strides import alike_and_each_its_own, far_apart
from correctness.layers.accuracy import assert_accurate, assert_as_accurate_as_eager
from correctness.layers.layouts import LAYOUTS, OF_GRADIENTS, laid_out
from correctness.layers.operations import BROADCAST, Inputs, call, leaves_of, random_inputs, results
from correctness.support.contracts import assert_near, skip_if_slow
from correctness.support.default_dtype import OTHERS, default_dtype
from impl.layers import OPERATIONS, EagerLayers
from shardmark.api import Implementation, RegistryError, resolve
from shardmark.api.registry import check_contract

pytestmark = [pytest.mark.family("layers"), pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF = DTYPES[2:]
EACH = pytest.mark.parametrize("operation", OPERATIONS)

SIZES = {  # rows, dim
    "one_row": (1, 64),
    "one_column": (5, 1),
    "odd": (13, 29),
    "block_and_one": (9, 1025),
    "wider_than_a_block": (3, 8200),
    "wider_than_any_block": (2, 65_600),
    "rows_beyond_programs": (300, 8),
    "narrow_rows_beyond_1024": (2051, 6),
}
LARGE = "rows_beyond_programs", "narrow_rows_beyond_1024", "wider_than_any_block"
SIZE = [pytest.param(name, marks=pytest.mark.large if name in LARGE else ()) for name in SIZES]


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZE)
def test_is_as_accurate_as_eager(
    implementation: Implementation, size: str, dtype: torch.dtype, operation: str, device: str
) -> None:
    assert_as_accurate_as_eager(implementation.watched, random_inputs(operation, *SIZES[size], device, dtype))


@pytest.mark.large
@pytest.mark.judged
@EACH
def test_more_rows_than_16_bits_count(implementation: Implementation, operation: str, device: str) -> None:
    """65,560 of them: kernels may number rows or programs in 16 bits, and grids end at 65,535."""
    rows = 65_560

    def of(rows: int) -> Inputs:
        return random_inputs(operation, rows, 2, device)

    skip_if_slow(implementation, lambda share: results(implementation.watched, of(rows // share)), device)
    assert_as_accurate_as_eager(implementation.watched, of(rows), when=f"of {rows:,} rows: ")


@pytest.mark.long
@EACH
@pytest.mark.parametrize("default", OTHERS, ids=str)
def test_another_default_dtype_changes_nothing(
    implementation: Implementation, operation: str, default: torch.dtype, device: str
) -> None:
    """Constants that are made as tensors of the default dtype, as eps or 1/dim, are rounded."""
    inputs = replace(random_inputs(operation, 300, 24, device, torch.float32), eps=0.3)  # so large that it counts
    with default_dtype(default):
        assert_as_accurate_as_eager(implementation.watched, inputs)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_is_within_the_roundings_that_twice_are_allowed(operation: str, dtype: torch.dtype, device: str) -> None:
    for rows, dim in SIZES.values():
        assert_as_accurate_as_eager(EagerLayers, random_inputs(operation, rows, dim, device, dtype), times=1)


def test_eager_is_the_formula(device: str) -> None:
    """One element of each result from its definition."""
    found = {name: results(EagerLayers, _few(name, device)) for name in OPERATIONS}
    x, weight = _few("rms_norm", device).tensors.values()
    mean = sum(each**2 for each in x[2].tolist()) / 6
    assert found["rms_norm"]["normed"][2, 3].item() == pytest.approx(
        x[2, 3].item() / math.sqrt(mean + 1e-5) * weight[3].item()
    )
    x, residual, _ = _few("add_rms_norm", device).tensors.values()
    assert torch.equal(found["add_rms_norm"]["total"], x + residual)
    gate, up = (each[1, 4].item() for each in _few("swiglu", device).tensors.values())
    assert found["swiglu"]["gated"][1, 4].item() == pytest.approx(gate / (1 + math.exp(-gate)) * up)
    q, *_ = _few("rotary", device).tensors.values()
    pair, turned = (
        torch.view_as_complex(each[1, 2, 3].unflatten(-1, (-1, 2)))[1].item()
        for each in (q, found["rotary"]["turned_q"])
    )
    angle = 3 * 10_000.0 ** (-2 / 6)
    assert abs(turned - pair * complex(math.cos(angle), math.sin(angle))) < 1e-12


def _few(operation: str, device: str) -> Inputs:
    torch.manual_seed(1)
    return random_inputs(operation, 4, 6, device, torch.float64)


@EACH
@pytest.mark.parametrize("lead", [(2, 3), (0,), (2, 0, 3)], ids=str)
def test_takes_any_leading_dimensions(
    implementation: Implementation, lead: tuple[int, ...], operation: str, device: str
) -> None:
    """Results of an empty tensor are empty, and weight's gradient is zero."""
    inputs = random_inputs(operation, 0 if operation == "rotary" and 0 in lead else 5, 8, device, lead=lead)
    assert_as_accurate_as_eager(implementation.watched, inputs)


def test_norms_and_gates_a_single_row_without_leading_dimensions(implementation: Implementation, device: str) -> None:
    for operation in ("rms_norm", "add_rms_norm", "swiglu"):
        inputs = random_inputs(operation, 1, 24, device)
        for each in (inputs.tensors, inputs.grads):
            each.update({name: x.reshape(24) for name, x in each.items()})
        assert_as_accurate_as_eager(implementation.watched, inputs, when=f"{operation} of (24): ")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "rotary"])
def test_weight_and_tables_may_be_float32_beside_half_precision(
    implementation: Implementation, operation: str, dtype: torch.dtype, device: str
) -> None:
    """As in mixed precision: the result keeps x's dtype, and weight's gradient weight's."""
    inputs = random_inputs(operation, 9, 48, device).to(dtype, torch.float32)
    assert_as_accurate_as_eager(implementation.watched, inputs)


def _marked(layouts: Iterable[str]) -> list[Any]:
    """Histories of calls have windows too."""
    return [pytest.param(how, marks=pytest.mark.judged if how == "windows" else ()) for how in layouts]


@pytest.mark.long
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", _marked(LAYOUTS))
def test_takes_non_contiguous_arguments(
    implementation: Implementation, how: str, dtype: torch.dtype, operation: str, device: str
) -> None:
    for layouts in alike_and_each_its_own(how, [*LAYOUTS, ""]):
        inputs = random_inputs(operation, 4, 24, device, dtype, lead=(2, 3))
        when = f"with arguments {', '.join(each or 'contiguous' for each in layouts)}: "
        assert_as_accurate_as_eager(implementation.watched, laid_out(inputs, layouts), when=when)


@pytest.mark.parametrize(
    ("operation", "dim"),
    [("rms_norm", -2), ("add_rms_norm", -2), ("swiglu", -2), ("rotary", -4), ("rms_norm", 0), ("swiglu", 0)],
)
def test_takes_offsets_beyond_32_bits(implementation: Implementation, operation: str, dim: int, device: str) -> None:
    """The number of a row or a sequence times its stride, as of a slice of a buffer for all layers, is more than 32
    bits hold."""
    lead = () if dim == -2 else (3,)
    inputs = random_inputs(operation, 4 if lead else 3, 24, device, torch.bfloat16, lead)
    rows = [name for name in inputs.tensors if name not in BROADCAST]
    far = far_apart(dim, *(inputs.tensors[name] for name in rows), *inputs.grads.values())
    inputs.tensors.update(zip(rows, far[: len(rows)], strict=True))
    inputs.grads.update(zip(inputs.grads, far[len(rows) :], strict=True))
    assert_as_accurate_as_eager(implementation.watched, inputs)


@pytest.mark.long
@EACH
@pytest.mark.parametrize("how", _marked(OF_GRADIENTS))
def test_takes_gradients_of_any_strides(implementation: Implementation, how: str, operation: str, device: str) -> None:
    """A transpose after the layer, or a sum, gives its backward such a gradient."""
    for layouts in alike_and_each_its_own(how, [*OF_GRADIENTS, ""], 2):
        inputs = random_inputs(operation, 4, 24, device, lead=(2, 3))
        arguments = layouts[::-1] if how in LAYOUTS else ()
        when = f"with gradients {', '.join(each or 'contiguous' for each in layouts)}: "
        assert_as_accurate_as_eager(implementation.watched, laid_out(inputs, arguments, layouts), when=when)


@EACH
def test_gives_gradients_to_what_requires_them(implementation: Implementation, operation: str, device: str) -> None:
    inputs = random_inputs(operation, 7, 24, device)
    for number in range(1, len(inputs.learned)):
        for needed in combinations(inputs.learned, number):
            found = results(implementation.watched, inputs, [*needed])
            assert_accurate(found, inputs, when=f"where {' and '.join(needed)} alone require gradients: ")


@pytest.mark.parametrize("operation", ["add_rms_norm", "rotary"])
def test_one_result_may_be_used_alone(implementation: Implementation, operation: str, device: str) -> None:
    """As of the sum of a last block. An argument that the result does not depend on gets no gradient, or zeros."""
    inputs = random_inputs(operation, 7, 24, device)
    for used in inputs.grads:
        leaves = leaves_of(inputs)
        result, learned = call(implementation.watched, inputs, leaves)[used], [leaves[name] for name in inputs.learned]
        given = torch.autograd.grad(result, learned, inputs.grads[used], allow_unused=True)
        alone = {name: x if name == used else torch.zeros_like(x) for name, x in inputs.grads.items()}
        wanted = results(EagerLayers, replace(inputs, grads=alone).to(torch.float64))
        for name, leaf, x in zip(inputs.learned, learned, given, strict=True):
            found = {f"grad_{name}": torch.zeros_like(leaf) if x is None else x}
            assert_near(found, {f"grad_{name}": wanted[f"grad_{name}"]}, f"of {used} alone", share=1e-5)


@pytest.mark.large
@pytest.mark.examples(12, 60, 399)
@pytest.mark.parametrize("of", ["rows", "columns"])
@EACH
def test_none_is_lost_of_any_number(
    implementation: Implementation, operation: str, of: str, examples: int, device: str
) -> None:
    """For any tile size, the last row and the last column count."""
    for n in one_beyond_tiles(examples):
        inputs = random_inputs(operation, n if of == "rows" else 3, 6 if of == "rows" else n, device)
        assert_accurate(results(implementation.watched, inputs), inputs, when=f"of {n} {of}: ")


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (3, 6), (33, 2)], ids=str)
def test_rotates_any_number_of_heads(implementation: Implementation, heads: tuple[int, int], device: str) -> None:
    """Grouped queries, one head, and more than a kernel's block has; also as a projection gives them, heads inside."""
    inputs = random_inputs("rotary", 5, 6, device)
    for each in (inputs.tensors, inputs.grads):
        for name, count in zip([name for name in each if name[-1] in "qk"], heads, strict=True):
            each[name] = torch.randn(2, count, 5, 6, device=device)
    assert_as_accurate_as_eager(implementation.watched, inputs)
    inside = ["heads_inside"] * 2
    assert_as_accurate_as_eager(implementation.watched, laid_out(inputs, inside, inside))


NOT_LAYERS = {
    "3": "it has none of the functions rms_norm, add_rms_norm, swiglu, rotary",
    "SimpleNamespace(swiglu=lambda gate: gate)": "swiglu is not called with 2 tensors",
    "SimpleNamespace(swiglu=lambda gate, up: gate * up)": "swiglu of ones begins with 1.0000, expected 0.7311",
    "SimpleNamespace(swiglu=lambda gate, up: (silu(gate) * up).detach())": "the result of swiglu is not differentiable",
    "SimpleNamespace(rms_norm=lambda x, weight, *, eps: x.sum())": "rms_norm returned a tensor (), expected (3, 16)",
    "SimpleNamespace(rotary=lambda q, k, cos, sin: q)": "rotary returned Tensor, and not 2 tensors",
}
OWN = "from types import SimpleNamespace\nfrom torch.nn.functional import silu\n"


@pytest.mark.parametrize("expression", NOT_LAYERS)
def test_what_has_no_layers_is_told_in_one_line(expression: str, tmp_path: Path) -> None:
    (own := tmp_path / f"own_{abs(hash(expression))}.py").write_text(f"{OWN}mine = {expression}\n")
    with pytest.raises(RegistryError, match=rf"^[^\n]*{re.escape(NOT_LAYERS[expression])}[^\n]*$"):
        check_contract(resolve("layers", f"{own}:mine"), "cpu")
