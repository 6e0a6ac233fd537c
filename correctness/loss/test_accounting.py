"""The loss's bytes and FLOPs in closed form, against the meter and the counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from impl.loss import accounting
from impl.loss.cases import LossCase
from impl.loss.workload import LossStep
from shardmark.api import Implementation, family
from shardmark.meter.measure_case import metered_peak
from shardmark.meter.memory import meter

pytestmark = pytest.mark.family("loss")

ACCOUNTED = [
    LossCase(1024, 128, 4096),
    LossCase(777, 24, 1003),
    LossCase(600, 16, 700, "float64"),
    LossCase(530, 16, 200, "bfloat16"),
    LossCase(600, 16, 111, "float16"),
    LossCase(100, 16, 50, "float16"),
    LossCase(1030, 512, 300),
]

PUBLISHED = [LossCase(8192, dim, vocab, "bfloat16") for dim in (2048, 4096) for vocab in (32768, 50257, 128256)]

METERED = [
    pytest.param(case, marks=[] if i in (0, 3, 5, 6) else pytest.mark.sweep, id=str(case))
    for i, case in enumerate(ACCOUNTED)
]
"""By default: float32, one chunk and several in half precision, and a large dim."""


def _peak(name: str, case: LossCase, device: str = "cpu") -> int:
    return metered_peak(LossStep, family("loss").implementations[name], case, device)


@pytest.mark.parametrize("case", METERED)
@pytest.mark.parametrize("name", ["eager", "chunked", "fused_pytorch"])
def test_peak_is_exact(name: str, case: LossCase) -> None:
    formula = family("loss").implementations[name].memory
    assert formula is not None
    assert _peak(name, case) == formula(case)


@pytest.mark.parametrize("case", [LossCase(50, 24, 1003), LossCase(64, 16, 400)], ids=str)
def test_fused_triton_peak_is_exact(case: LossCase) -> None:
    """The interpreter keeps each chunk's losses, so only one chunk is exact; it takes eight bytes of its own."""
    if reason := family("loss").implementations["fused_triton"].unavailable_reason("cpu"):
        pytest.skip(reason)
    assert 0 <= _peak("fused_triton", case) - accounting.fused_triton_peak(case) <= 8


@pytest.mark.parametrize("case", METERED[:3])
def test_torchs_linear_cross_entropy_peak_is_exact(case: LossCase) -> None:
    entry = family("loss").implementations["linear_cross_entropy"]
    if reason := entry.unavailable_reason("cpu"):
        pytest.skip(reason)
    assert _peak(entry.name, case) == accounting.linear_cross_entropy_peak(case)


@pytest.mark.parametrize("case", [case for case in PUBLISHED if case.vocab >= 128_000], ids=str)
def test_at_a_vocabulary_of_128_thousand_the_fused_loss_takes_a_third_of_eager(case: LossCase) -> None:
    ratio = accounting.eager_peak(case) / accounting.fused_triton_peak(case)
    assert ratio >= 3, f"{ratio:.2f}"


def test_a_chunk_costs_nothing_at_the_peak_of_half_precision() -> None:
    for case in PUBLISHED:
        assert accounting.fused_triton_peak(case) <= accounting.fused_peak(case) * 1.001


@pytest.mark.should("nothing is computed for gradients that nobody asks for")
@pytest.mark.parametrize("how", ["no_grad", "frozen", "frozen_weight"])
def test_without_gradients_wanted_none_are_made(implementation: Implementation, how: str, device: str) -> None:
    if not implementation.name.startswith("fused"):
        pytest.skip(f"{implementation.name} makes gradients in backward")
    case = LossCase(64, 64, 512)
    with meter(device) as memory:
        step = LossStep(implementation, case, device)
        step.weight.requires_grad_(how == "no_grad")
        step.hidden.requires_grad_(how != "frozen")
        memory.reset_peak()
        with torch.set_grad_enabled(how != "no_grad"):
            loss = step.loss_of(step.hidden, step.weight, step.targets)
    grad_hidden = case.tokens * case.dim * 4 if how == "frozen_weight" else 0
    held = accounting._inputs(case) + accounting._chunk(case) + grad_hidden
    few = case.tokens * 40
    assert held <= memory.tensors <= held + few < held + case.vocab * case.dim * 4
    assert loss.requires_grad == (how == "frozen_weight")


def test_flops_are_those_counted() -> None:
    case = LossCase(64, 16, 40)
    step = LossStep(family("loss").implementations["eager"], case, "cpu")
    with FlopCounterMode(display=False) as counter:
        step.step(lambda part: None)
    work = accounting.work(case)
    assert work.flops == counter.get_total_flops()
    assert work.bytes_moved == sum(x.nbytes for x in (step.hidden, step.weight) for _ in range(2)) + 8 * 64


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
def test_the_compiler_needs_no_more_than_eager(device: str) -> None:
    case = LossCase(300, 32, 500)
    _peak("compiled", case, device)  # compiles it beforehand
    assert _peak("compiled", case, device) <= accounting.eager_peak(case)
