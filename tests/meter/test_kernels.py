"""The kernels of a profiled step: counts, shares, modules, categories."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from impl.attention import FlashAttentionPyTorch, as_attention, sdpa
from shardmark.meter.kernels import ATTENTION, ELSE, MATRIX_PRODUCT, SOFTMAX, Call, StepProfile, category, read_profile
from shardmark.meter.trace import profile_step
from shardmark.rows.observers.attention_parts import attention_parts
from tests.support.training_step import TINY, TrainingStep


@pytest.fixture(scope="module")
def eager_step() -> StepProfile:
    return profile_step(TrainingStep(), "cpu")


def _operators(profile: StepProfile, phase: str, name: str) -> int:
    return sum(kernel.calls for kernel in profile.kernels(phase) if kernel.name == name)


def test_operators_are_counted_phase_by_phase(eager_step: StepProfile) -> None:
    linears = 7 * TINY.layers + 1  # q k v o and w1 w2 w3, and the output
    assert list(eager_step.elapsed) == ["forward", "backward", "optimizer"]
    counts = {
        name: [_operators(eager_step, phase, f"aten::{name}") for phase in eager_step.elapsed]
        for name in (
            "mm",
            "bmm",
            "_softmax",
            "_softmax_backward_data",
            "_log_softmax",
            "_fused_adamw_",
            "silu_backward",
        )
    }
    assert counts == {
        "mm": [linears, 2 * linears, 0],
        "bmm": [2 * TINY.layers, 4 * TINY.layers, 0],
        "_softmax": [TINY.layers, 0, 0],
        "_softmax_backward_data": [0, TINY.layers, 0],
        "_log_softmax": [1, 0, 0],
        "_fused_adamw_": [0, 0, 1],
        "silu_backward": [0, TINY.layers, 0],
    }


def test_shares_are_of_the_phase_and_sums_agree(eager_step: StepProfile) -> None:
    for phase, elapsed in eager_step.elapsed.items():
        kernels = eager_step.kernels(phase)
        total = sum(kernel.seconds for kernel in kernels)
        assert sum(kernel.share for kernel in kernels) == pytest.approx(1)
        assert sum(eager_step.seconds(phase).values()) == pytest.approx(total)
        assert [kernel.seconds for kernel in kernels] == sorted((k.seconds for k in kernels), reverse=True)
        assert 0 < total <= elapsed  # on CPU operators' own times do not overlap
    row = eager_step.as_row(top=3)
    assert [len(row[phase]["top"]) for phase in row] == [3, 3, 3]
    assert sum(row[phase]["calls"] for phase in row) == len(eager_step.calls)
    assert row["forward"]["categories"] == eager_step.seconds("forward")


def test_each_operator_runs_for_its_module_forward_and_backward(eager_step: StepProfile) -> None:
    where = Counter((call.name.removeprefix("aten::"), call.phase, call.module) for call in eager_step.calls)
    for i in range(TINY.layers):
        for name in ("attention.query", "attention.output", "feed_forward.w2"):
            assert where["mm", "forward", f"blocks.{i}.{name}"] == 1
            assert where["mm", "backward", f"blocks.{i}.{name}"] == 2
        assert where["bmm", "forward", f"blocks.{i}.attention"] == 2
        assert where["bmm", "backward", f"blocks.{i}.attention"] == 4
        assert where["_softmax", "forward", f"blocks.{i}.attention"] == 1
        assert where["_softmax_backward_data", "backward", f"blocks.{i}.attention"] == 1
    assert where["_log_softmax", "forward", None] == 1  # the loss is in no module
    assert where["_fused_adamw_", "optimizer", None] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", MATRIX_PRODUCT),
        ("aten::addmm", MATRIX_PRODUCT),
        ("aten::baddbmm", MATRIX_PRODUCT),
        ("aten::_scaled_mm", MATRIX_PRODUCT),
        ("aten::mv", MATRIX_PRODUCT),
        ("ampere_sgemm_128x64_tn", MATRIX_PRODUCT),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", MATRIX_PRODUCT),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(Params)", MATRIX_PRODUCT),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(Params)", MATRIX_PRODUCT),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", ATTENTION),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("attention_backward_kv", ATTENTION),
        ("aten::_softmax", SOFTMAX),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)", SOFTMAX),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", None),
        ("aten::matmul", None),  # it calls the operator that multiplies
        ("aten::addcmul", None),
        ("Memcpy DtoD (Device -> Device)", None),
    ],
)
def test_a_name_tells_the_category(name: str, expected: str | None) -> None:
    assert category(name) == expected


def test_fused_attention_is_attention_with_what_it_calls() -> None:
    profile = profile_step(TrainingStep(sdpa), "cpu")
    assert profile.seconds("forward")[ATTENTION] > 0 and profile.seconds("backward")[ATTENTION] > 0
    own = profile_step(TrainingStep(as_attention(FlashAttentionPyTorch)), "cpu")
    kinds = {call.name: call.category for call in own.calls if call.module == "blocks.0.attention"}
    assert kinds["aten::bmm"] == MATRIX_PRODUCT and kinds["aten::exp_"] == ATTENTION
    assert kinds["aten::unflatten"] == ELSE  # into heads, before attention


def test_attentions_parts_are_its_two_products_in_their_order_and_softmax(eager_step: StepProfile) -> None:
    modules = eager_step.inside(".attention", "forward")
    assert list(modules) == [f"blocks.{i}.attention" for i in range(TINY.layers)]
    parts = attention_parts(modules)
    of = {kernel.name: kernel.seconds for kernel in eager_step.kernels("forward")}
    assert parts["scores"] + parts["values"] == pytest.approx(of["aten::bmm"])
    assert parts["softmax"] == pytest.approx(of["aten::softmax"] + of["aten::_softmax"])


def _call(name: str, operator: str, start: float, seconds: float) -> Call:
    return Call(name, operator, category(operator) or category(name) or ELSE, "forward", "0.attention", start, seconds)


def test_a_product_of_several_kernels_is_one() -> None:
    scores = [_call("sgemm", "aten::bmm", 1.0, 2.0), _call("reduce", "aten::bmm", 1.0, 3.0)]
    rest = [_call("cunn_SoftMaxForward", "aten::_softmax", 2.0, 7.0), _call("sgemm", "aten::bmm", 3.0, 11.0)]
    assert attention_parts({"a": [*scores, *rest]}) == {"scores": 5.0, "softmax": 7.0, "values": 11.0}
    assert attention_parts({"a": scores}) == attention_parts({}) == {}


def test_fused_attention_shows_no_parts() -> None:
    profile = profile_step(TrainingStep(sdpa), "cpu")
    assert profile.inside(".attention", "forward") and attention_parts(profile.inside(".attention", "forward")) == {}


def on_device(name: str, start_ns: int, correlation: int = 0, is_range: bool = False) -> Any:
    """A kernel or a range of 4 us as the profiler reports it; without an operator its `correlation` is 0."""
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: DeviceType.CUDA,
        start_ns=lambda: start_ns,
        duration_ns=lambda: 4_000,
        linked_correlation_id=lambda: correlation,
        is_user_annotation=lambda: is_range,
    )


def test_on_cuda_kernels_are_of_the_operator_that_launched_them() -> None:
    def event(name: str, start: int, end: int, parent: FunctionEvent | None = None, **more: Any) -> FunctionEvent:
        made = FunctionEvent(0, name, 1, start, end, use_device="cuda", **more)
        if parent is not None:
            made.set_cpu_parent(parent)
        return made

    step = event("forward", 100, 200, is_user_annotation=True)
    step.append_kernel("forward", 0, 100)  # the range's own shadow on the device, which is no kernel
    module = event("0.attention", 110, 190, step, is_user_annotation=True)
    product = event("aten::bmm", 120, 130, module)
    product.append_kernel("sgemm", 0, 20)
    product.append_kernel("reduce", 0, 1)
    flash = event("FlashAttentionTriton", 140, 150, module)
    flash.append_kernel("my_kernel", 0, 30)
    copy = event("aten::copy_", 150, 155, module)
    copy.append_kernel("Memcpy DtoD (Device -> Device)", 0, 2)
    optimizer = event("optimizer", 200, 300, is_user_annotation=True)
    kernels = [
        on_device("triton_softmax", 260_000),
        on_device("optimizer", 250_000, is_range=True),
        on_device("sgemm", 175_000, correlation=7),
    ]
    result = SimpleNamespace(events=lambda: kernels, trace_start_ns=lambda: 50_000)
    again = event("forward", 300, 350, is_user_annotation=True)
    events = [step, module, product, flash, copy, optimizer, again]
    profiler: Any = SimpleNamespace(events=lambda: events, profiler=SimpleNamespace(kineto_results=result))
    found = read_profile(profiler, ["forward", "optimizer", "rest"], frozenset({"0.attention"}), "cuda")
    assert [(call.name, call.category, call.phase, call.module, round(call.seconds * 1e6)) for call in found.calls] == [
        ("sgemm", MATRIX_PRODUCT, "forward", "0.attention", 20),
        ("reduce", MATRIX_PRODUCT, "forward", "0.attention", 1),
        ("my_kernel", ATTENTION, "forward", "0.attention", 30),
        ("Memcpy DtoD (Device -> Device)", ELSE, "forward", "0.attention", 2),
        ("triton_softmax", SOFTMAX, "optimizer", None, 4),
    ]
    assert found.elapsed == {"forward": pytest.approx(1.5e-4), "optimizer": pytest.approx(1e-4)}
    assert [(kernel.name, kernel.share) for kernel in found.kernels("forward")][:2] == [
        ("my_kernel", pytest.approx(30 / 53)),
        ("sgemm", pytest.approx(20 / 53)),
    ]
