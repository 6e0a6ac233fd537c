"""Formulas for CUDA: against PyTorch's own functions for fake tensors, and against the meter on a GPU."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from impl.accounting.ledger import explain
from impl.attention import accounting, workspace
from impl.attention.cases import MODES, AttentionCase
from impl.attention.workload import AttentionPass
from impl.collectives.accounting import in_place_peak
from impl.collectives.cases import COLLECTIVES, CollectiveCase
from impl.fsdp.cases import FSDPCase
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.model.sizes import SIZES
from impl.precision import PRECISIONS
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.training_step import EagerStep
from impl.training_step.accounting import eager_peak
from impl.training_step.cases import TrainingStepCase
from shardmark.api import MB
from shardmark.api.registry import family
from shardmark.meter.memory import meter

aten = torch.ops.aten


def flash(q: Tensor) -> tuple[Tensor, Any]:
    out, log_sum_exp, _, _, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, q, q)
    saved = (q, q, q, q, out, log_sum_exp, None, None, q.shape[-2], q.shape[-2], 0.0, False, seed, offset)
    return log_sum_exp, aten._scaled_dot_product_flash_attention_backward(*saved)


def efficient(q: Tensor) -> tuple[Tensor, Any]:
    out, log_sum_exp, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
    needed = [True, True, True, False]
    saved = (q, q, q, q, None, out, log_sum_exp, seed, offset, 0.0, needed)
    return log_sum_exp, aten._scaled_dot_product_efficient_attention_backward(*saved)


def cudnn(q: Tensor) -> tuple[Tensor, Any]:
    out, log_sum_exp, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
    length = q.shape[-2]
    saved = (q, q, q, q, out, log_sum_exp, seed, offset, None, None, None, length, length, 0.0, False)
    return log_sum_exp, aten._scaled_dot_product_cudnn_attention_backward(*saved)


@pytest.mark.parametrize("seq", [64, 100])
@pytest.mark.parametrize("kernel", [flash, efficient, cudnn])
def test_a_gradient_is_copied_where_pytorchs_kernel_lays_it_out_in_another_order(
    kernel: Callable[[Tensor], tuple[Tensor, Any]], seq: int
) -> None:
    name = f"sdpa_{kernel.__name__}"
    case = AttentionCase(batch=2, heads=3, seq=seq, head_dim=16, dtype="bfloat16")
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(case.shape, dtype=case.torch_dtype, device="cuda")
        log_sum_exp, gradients = kernel(q)
    copied = any(gradient is not None and gradient.stride() != q.stride() for gradient in gradients)
    implementation = family("attention").implementations[name]
    held, forward = (explain(implementation, replace(case, mode=mode), "cuda") for mode in ("both", "forward"))
    assert held.entries.get("copy of a gradient", 0) == copied * q.numel() * 2
    assert forward.entries["log-sum-exp"] == log_sum_exp.numel() * 4


@pytest.mark.parametrize("mode", MODES)
def test_sdpa_is_the_kernel_that_takes_the_dtype(mode: str) -> None:
    case = AttentionCase(batch=2, heads=3, seq=100, head_dim=16, mode=mode)
    assert accounting.sdpa_peak(case, "cuda") == accounting.sdpa_efficient_peak(case)
    half = replace(case, dtype="bfloat16")
    assert accounting.sdpa_peak(half, "cuda") == accounting.flash_peak(half)


DROPOUT = 16
"""Bytes of dropout's seed and offset, two int64, which attention's kernels on CUDA return."""


@pytest.mark.parametrize("context", [32, 61])
def test_of_a_step_in_float32_cuda_keeps_no_second_copy_of_attentions_output(context: int) -> None:
    """A token's heads lie side by side already; the log-sum-exp may be a few rows longer."""
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(2, 3, context, 16, device="cuda")
        outs = [aten._scaled_dot_product_efficient_attention(q, q, q, None, True)[0]]
        outs += [aten._scaled_dot_product_flash_attention(q, q, q)[0]]
        copied = [
            out.transpose(1, 2).flatten(-2).untyped_storage()._cdata != out.untyped_storage()._cdata for out in outs
        ]
    assert copied == [False, True]
    case, size = TrainingStepCase("mini", 2, context, mode="forward"), SIZES["mini"]
    found = eager_peak(case) - eager_peak(case, "cuda")
    longer = 4 * 2 * size.heads * (-context % 32) + DROPOUT
    assert found == size.layers * (4 * 2 * context * size.d_model - longer) > 0
    assert eager_peak(replace(case, mode="step"), "cuda") <= eager_peak(replace(case, mode="step"))
    half = replace(case, dtype="bfloat16")
    assert eager_peak(half, "cuda") == eager_peak(half) + size.layers * (DROPOUT + 8)  # flash's has one int64 more


AT_THE_LOSS = {
    "checkpointing": TrainingStepCase("tiny", 4, 250),
    "data_parallel": TrainingStepCase("tiny", 4, 250),
    "sharded_optimizer": ShardedStepCase("tiny", 4, 250),
    "fsdp": FSDPCase("tiny", 4, 250),
}
"""A case of each family, chosen so that its step peaks at the loss."""


@pytest.mark.parametrize("name", AT_THE_LOSS)
def test_nor_does_a_step_on_ranks_whatever_is_sharded(name: str) -> None:
    """Checkpointing changes the difference only by the tensors that its policy frees."""
    case, size = AT_THE_LOSS[name], SIZES["tiny"]
    longer = 4 * case.batch * size.heads * (-case.context % 32) + DROPOUT
    output = 4 * case.tokens * size.d_model
    for implementation in family(name).implementations.values():
        if implementation.memory is None:  # PyTorch's own, which is predicted
            continue
        if implementation.name in ("full", "segments", "recursive"):
            kept = 0
        elif implementation.name == "selective":
            kept = -longer * size.layers
        else:
            kept = size.layers // (2 if implementation.name == "every_2" else 1) * (output - longer)
        found = implementation.peak(case, "cpu") - implementation.peak(case, "cuda")
        assert found == kept, f"{implementation}: {found:,} bytes, expected {kept:,}"


@pytest.mark.parametrize(
    ("name", "case"), [("sharded_optimizer", ShardedStepCase("tiny", 1, 8)), ("fsdp", FSDPCase("tiny", 1, 8))]
)
def test_nccls_reduce_scatter_has_no_buffers_of_ours(name: str, case: Any) -> None:
    for implementation in family(name).implementations.values():
        if implementation.name.startswith("sharded"):
            held = [explain(implementation, case, device).entries for device in ("cpu", "cuda")]
            buffers = [sum(nbytes for entry, nbytes in each.items() if "buffers" in entry) for each in held]
            assert buffers[0] > buffers[1] == 0, f"{implementation}: {buffers}"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nccl_works_on_the_tensors_and_gloo_on_copies(collective: str) -> None:
    case = CollectiveCase(collective, MB)
    backend = family("collectives").implementations["backend"]
    assert backend.peak(case, "cuda") == in_place_peak(case)
    assert backend.peak(case, "cpu") == in_place_peak(case) + (0 if collective == "all_reduce" else case.bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_autocast_casts_on_cuda_what_it_casts_on_cpu(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the eager step, so that one formula serves both: what CUDA alone would cast is in float32 already."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **options: True)
    operators = [operators_of_forward(device, dtype) for device in ("cpu", "cuda")]
    assert operators[0] == operators[1] and len(operators[0]) > 20


def operators_of_forward(device: str, dtype: str) -> list[tuple[str, ...]]:
    """Each operator of the MLP's forward with the dtypes of its inputs and outputs."""

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            result = function(*args, **(options or {}))
            if function.namespace == "aten":
                tensors = (str(leaf.dtype) for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor))
                found.append((function.name(), *tensors))
            return result

    found: list[tuple[str, ...]] = []
    with torch.device("meta"):
        module = MLPLanguageModel(MLP_SIZES["mlp-tiny"])
    with FakeTensorMode(), torch.no_grad():
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                fake = torch.empty(parameter.shape, device=device)
                part.register_parameter(name, nn.Parameter(fake, requires_grad=False))
        tokens = torch.zeros(2, 16, dtype=torch.long, device=device)
        step = EagerStep(module, Any, precision=PRECISIONS[dtype])  # type: ignore[arg-type]
        with Operators():
            step.forward(tokens, tokens)
    return found


CASE = AttentionCase(batch=2, heads=4, seq=256, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize(("head_dim", "columns"), [(8, 32), (32, 32), (40, 64), (128, 128), (136, 192), (256, 256)])
def test_flash_attention_rounds_head_dim_up_for_the_gradient_of_q(head_dim: int, columns: int) -> None:
    for seq, rows in ((128, 128), (129, 256)):
        found = workspace.flash_workspace(replace(CASE, heads=200, seq=seq, head_dim=head_dim), "cuda").entries
        assert found["gradient of q in float32"] == 2 * 200 * rows * columns * 4


@pytest.mark.parametrize(
    ("dtype", "head_dim", "queries", "columns"),
    [
        ("float32", 16, 64, 64),
        ("float32", 64, 64, 64),
        ("float32", 72, 128, 128),
        ("float32", 136, 128, 192),
        ("bfloat16", 64, 64, 64),
        ("bfloat16", 72, 128, 128),
        ("bfloat16", 128, 128, 128),
    ],
)
def test_efficient_attention_rounds_head_dim_up_to_its_blocks(
    dtype: str, head_dim: int, queries: int, columns: int
) -> None:
    case = replace(CASE, head_dim=head_dim, dtype=dtype, seq=queries)
    keys = 128 if dtype == "bfloat16" and head_dim > 64 else 64
    found = workspace.efficient_workspace(case, "cuda").entries
    assert found["gradient of q in float32"] == 2 * 4 * (queries * columns * 4 + columns // keys * 16)
    longer = workspace.efficient_workspace(replace(case, seq=queries + 1), "cuda").entries
    assert longer["gradient of q in float32"] == 2 * found["gradient of q in float32"]


def test_flash_attention_splits_keys_where_queries_leave_multiprocessors_idle() -> None:
    """On 132 of them, with two blocks each: 212 blocks of 64 queries are 80%."""
    splits = partial(workspace.key_splits, 1, multiprocessors=132)
    assert splits(212 * 64, 64) == 1
    assert splits(211 * 64, 64) == 5  # 1,055 blocks: four times 264, but for one
    assert splits(128 * 64, 64) == 2
    assert splits(64, 64) == 1  # keys of one block
    assert [splits(1024, head_dim) for head_dim in (64, 128, 192)] == [4, 8, 16]


@pytest.mark.parametrize(("at_hand", "splits"), [(None, 4), (132, 4), (8, 1)])
def test_it_splits_them_by_the_gpu_at_hand(at_hand: int | None, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 queries are 16 blocks of 64; without a GPU an H100's multiprocessors count."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: at_hand is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: Namespace(multi_processor_count=at_hand))
    found = workspace.flash_workspace(replace(CASE, batch=1, heads=1, seq=1024, mode="forward"), "cuda")
    assert found == (splits > 1) * splits * 1024 * (64 + 1) * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_on_cpu_no_workspace_has_a_formula(name: str, mode: str) -> None:
    assert family("attention").implementations[name].workspace(replace(CASE, mode=mode), "cpu") == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("heads", "head_dim"), [(None, 16), (4, 64), (4, 80)])
@pytest.mark.parametrize(
    ("name", "dtype"), [("flash", "bfloat16"), ("efficient", "bfloat16"), ("efficient", "float32")]
)
def test_kernels_take_on_a_gpu_what_their_formulas_say(
    name: str, dtype: str, heads: int | None, head_dim: int, mode: str, device: str
) -> None:
    if device == "cpu":
        pytest.skip("formulas of CUDA's kernels")
    implementation = family("attention").implementations[f"sdpa_{name}"]
    case = replace(CASE, heads=heads, head_dim=head_dim, dtype=dtype, mode=mode)
    with meter(device) as memory:
        step = AttentionPass(implementation, case, device)
        step.prepare()
        memory.reset_peak()
        step.step(lambda part: None)
    assert memory.tensors == pytest.approx(implementation.peak(case, device), abs=64)  # dropout's seed and offset
    if mode != "backward":  # whose forward came before
        assert math.isclose(memory.workspace.nbytes, implementation.workspace(case, device), abs_tol=64)
