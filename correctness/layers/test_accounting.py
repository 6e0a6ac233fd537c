"""The layers' bytes in closed form, against the meter."""

import pytest
import torch

from impl.layers import OPERATIONS, accounting
from impl.layers.cases import WIDTHS, LayersCase
from impl.layers.workload import LayersStep
from shardmark.api import family
from shardmark.meter.measure_case import metered_peak
from shardmark.meter.saved_tensors import saved_bytes

pytestmark = pytest.mark.family("layers")

ACCOUNTED = [
    LayersCase(operation, tokens, dim, dtype, head_dim=16)
    for operation in OPERATIONS
    for tokens, dim in ((40, 64), (3, 1040))
    for dtype in ("float64", "float32", "bfloat16", "float16")
]
PUBLISHED = [LayersCase(name, 8192, width, "bfloat16", head_dim=128) for name, width in WIDTHS.items()]


def _metered(name: str, case: LayersCase) -> int:
    return metered_peak(LayersStep, family("layers").implementations[name], case, "cpu")


@pytest.mark.parametrize("case", ACCOUNTED, ids=str)
def test_eager_peak_is_exact(case: LayersCase) -> None:
    assert _metered("eager", case) == accounting.eager_peak(case)


@pytest.mark.parametrize("case", [case for case in ACCOUNTED if case.dtype in ("float32", "float16")], ids=str)
def test_fused_triton_peak_is_exact(case: LayersCase) -> None:
    """The interpreter still holds the parts of weight's gradient of a sum where a GPU has freed them."""
    if reason := family("layers").implementations["fused_triton"].unavailable_reason("cpu"):
        pytest.skip(reason)
    kept = 4 * min(accounting.PROGRAMS, case.tokens) * case.dim if case.operation == "add_rms_norm" else 0
    assert 0 <= _metered("fused_triton", case) - accounting.fused_triton_peak(case) <= kept


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_fused_layers_keep_nothing_but_arguments_results_and_a_number_a_row(operation: str) -> None:
    implementation = family("layers").implementations["fused_triton"]
    if reason := implementation.unavailable_reason("cpu"):
        pytest.skip(reason)
    case = LayersCase(operation, 40, 64, "float16", head_dim=16)
    numbers, results = 4 * 40 * ("norm" in operation), 2 * 40 * 64 * (operation == "add_rms_norm")
    assert saved_bytes(LayersStep(implementation, case, "cpu")) == numbers + results


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_a_fused_layer_takes_no_more_than_its_arguments_results_and_their_gradients(case: LayersCase) -> None:
    """In a block of 8,192 tokens all that is beside them is below 7%."""
    held = accounting._held(case) + (1 if case.operation == "rms_norm" else 2) * accounting._row(case)
    assert held <= accounting.fused_triton_peak(case) <= 1.07 * held
    assert accounting.fused_triton_peak(case) < accounting.eager_peak(case)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_moved_are_each_tensor_once_in_forward_and_once_in_backward(operation: str) -> None:
    case = LayersCase(operation, 12, 32, "float16", head_dim=16)
    step = LayersStep(family("layers").implementations["eager"], case, "cpu")
    step.step(lambda part: None)
    forward = [*step.leaves, *step.constants, *step.results]
    distinct = [leaf for i, leaf in enumerate(step.leaves) if not (operation == "add_rms_norm" and i == 1)]
    read = {"rotary": step.constants}.get(operation, distinct)  # of a sum its result, as large as x
    moved = [*forward, *read, *step.grads, *(leaf.grad for leaf in distinct)]
    assert accounting.work(case).bytes_moved == sum(x.nbytes for x in moved if isinstance(x, torch.Tensor))


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_compiler_needs_no_more_than_eager(operation: str) -> None:
    case = LayersCase(operation, 300, 32, head_dim=16)
    _metered("compiled", case)  # compiles it beforehand
    assert _metered("compiled", case) <= accounting.eager_peak(case)
