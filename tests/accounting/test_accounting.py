"""Closed forms against the meter, against PyTorch's counter of FLOPs, and against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from correctness.support.metering import assert_metered, metered
from impl.accounting.beside import beside
from impl.accounting.model import training_work
from impl.accounting.plain import PlainLanguageModel
from impl.attention import accounting as attention
from impl.attention import eager_attention
from impl.attention.cases import MODES, AttentionCase
from impl.attention.workload import AttentionPass
from impl.collectives.accounting import bus_bandwidth
from impl.collectives.cases import CollectiveCase, calls
from impl.data_parallel import accounting as data_parallel
from impl.data_parallel.workload import DataParallelStep
from impl.model import SIZES, Transformer
from impl.training_step import accounting as training_step
from impl.training_step.cases import STEP_MODES, TrainingStepCase
from shardmark.api import MB, followed
from shardmark.api.registry import Implementation, family
from shardmark.meter.measure_case import metered_peak

ATTENTION = [
    AttentionCase(batch=2, seq=512, head_dim=32),
    AttentionCase(batch=3, seq=777, head_dim=24),
    AttentionCase(batch=2, heads=3, seq=100, head_dim=16, is_causal=False),
    AttentionCase(batch=1, seq=600, head_dim=16, dtype="float64"),
]
TRITON = [AttentionCase(batch=2, heads=3, seq=100, head_dim=24, dtype=dtype) for dtype in ("float32", "float16")]
"""Small, as they run in Triton's interpreter, whose tiles PyTorch's allocator does not see."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, case) for name in ("eager", "flash_pytorch", "sdpa_math", "sdpa_flash") for case in ATTENTION),
        *(("flash_triton", case) for case in TRITON),
    ],
    ids=str,
)
def test_attention_peak_is_exact_to_the_byte(name: str, case: AttentionCase, mode: str) -> None:
    implementation, case = family("attention").implementations[name], replace(case, mode=mode)
    if reason := implementation.unavailable_reason("cpu"):
        pytest.skip(reason)
    assert metered_peak(AttentionPass, implementation, case, "cpu") == implementation.peak(case, "cpu")


@pytest.mark.usefixtures("compiler")
def test_the_compiler_needs_no_more_than_eager(device: str) -> None:
    case = AttentionCase(batch=2, seq=300, head_dim=32)
    entry = family("attention").implementations["compiled"]
    metered_peak(AttentionPass, entry, case, device)  # compiles
    assert metered_peak(AttentionPass, entry, case, device) < attention.eager_peak(case)


def training_memory(implementation: Implementation, case: TrainingStepCase, phases: Sequence[str]) -> dict[str, int]:
    memory = metered(DataParallelStep, implementation, case)
    return {"peak": memory.tensors} | {phase: memory.phases[phase] for phase in phases}


@pytest.mark.parametrize(
    "case",
    [
        TrainingStepCase("tiny", 1, 4),  # the largest moment is the end of backward, bucketed's the output projection
        TrainingStepCase("tiny", 2, 32),  # the largest moment is the loss
        pytest.param(TrainingStepCase("tiny", 3, 61), marks=pytest.mark.sweep),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed"])
def test_training_step_peak_is_the_formulas(name: str, case: TrainingStepCase, worlds: Any) -> None:
    implementation = family("data_parallel").implementations[name]
    assert implementation.memory is not None
    phases = ("after_init", "before_step", "after_forward", "after_backward") if name in ("naive", "overlapped") else ()
    marks = beside(followed(PlainLanguageModel.of(case), "cpu")).marks
    expected = {"peak": implementation.memory(case)} | {phase: marks[phase] for phase in phases}
    assert_metered(worlds(2), [expected] * 2, training_memory, implementation, case, phases)


def test_training_flops_are_those_counted() -> None:
    case = TrainingStepCase("tiny", batch=2, context=32)
    size = SIZES[case.model]
    model = Transformer(size, context_length=case.context, attention=eager_attention)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(case.batch, case.context, dtype=torch.int64)).sum().backward()
    # The counter sees eager attention, whole and with its scores kept: 6 products where the formula has 7, halved.
    product = 2 * case.batch * case.context**2 * size.d_model * size.layers
    assert training_work(case).flops == counter.get_total_flops() - 6 * product + 7 * product // 2


def test_model_flops_are_those_of_the_formula_in_the_readme() -> None:
    case, size = TrainingStepCase("tiny", batch=2, context=32), SIZES["tiny"]
    model = Transformer(size, context_length=case.context)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight")
    tokens = case.batch * case.context
    step = 6 * matrices * tokens + 6 * size.layers * tokens * case.context * size.d_model
    assert training_step.work(case).model_flops == training_work(case).model_flops == step
    both = training_step.work(replace(case, mode="forward_backward"))
    forward = training_step.work(replace(case, mode="forward"))
    assert both.model_flops == step and 3 * forward.model_flops == step and forward.flops == forward.model_flops


def test_bytes_moved_are_weights_gradients_and_what_adamw_moves() -> None:
    case, weights = TrainingStepCase("tiny", batch=2, context=32), 4 * SIZES["tiny"].parameters
    moved = {mode: training_step.work(replace(case, mode=mode)).bytes_moved for mode in STEP_MODES}
    # Read in forward; read again, and as many gradients written; and 28 bytes a parameter.
    assert moved == {"forward": weights, "forward_backward": 3 * weights, "step": 3 * weights + 7 * weights}
    assert training_work(case).bytes_moved == moved["step"]


def test_data_parallel_work_is_that_of_all_ranks() -> None:
    case = TrainingStepCase("tiny", batch=2, context=32)
    assert data_parallel.work(case, 4).flops == 4 * training_work(case).flops
    assert data_parallel.work(case, 4).bytes_communicated == 2 * 3 * 4 * SIZES["tiny"].parameters // 4
    assert data_parallel.work(case, 1).bytes_communicated == 0


def test_bus_bandwidth_is_that_of_nccls_tests() -> None:
    """1 GB in 10 ms on 8 ranks: 100 GB/s algorithm, 175 GB/s bus."""
    assert bus_bandwidth("all_reduce", 10**9, 0.01, 8) == pytest.approx(175e9)
    assert CollectiveCase("all_reduce", MB).bytes == 2**20


def test_a_small_collective_is_called_often_and_has_an_element_for_each_rank() -> None:
    for device, most in (("cpu", 20), ("cuda", 100)):
        counts = [calls(size, device) for size in (8, 4096, MB, 64 * MB, 64 * MB + 4, 8192 * MB)]
        assert counts[0] == most and counts[-1] == 1 and counts == sorted(counts, reverse=True)
    assert CollectiveCase("all_gather", 8, ranks=4).bytes == 16 and CollectiveCase("all_reduce", 8).bytes == 8
    assert list(map(str, (CollectiveCase("all_reduce", size) for size in (8, 4096, 8192 * MB)))) == [
        "all_reduce-8B",
        "all_reduce-4KB",
        "all_reduce-8192MB",
    ]
