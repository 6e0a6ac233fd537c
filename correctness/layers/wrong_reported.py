"""Planted defects: layers that are wrong as public trackers report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from correctness.layers.textbook import Gated, Norm, Textbook, Turned, gated_gradients, norm_gradients, turned
from correctness.support.planting import defect
from impl.layers import check_norm, check_rotary
from impl.layers.contract import statistics_dtype


class _WeightSummedInItsDtype(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, _ = norm_gradients(x, weight, scale, grad)
        total = torch.zeros_like(weight)
        for rows in (grad * (x.to(scale.dtype) * scale).to(x.dtype)).reshape(-1, x.shape[-1]).split(1):
            total += rows[0].to(weight.dtype)
        return of_x, total, None


@defect(cause="numerics", caught_by="test_weights_gradient_is_summed_in_float32_over_many_rows")
class WeightsGradientSummedInHalfPrecision(Textbook):
    """linkedin/Liger-Kernel#950: weight's gradient is a sum over rows in bfloat16, which stops growing."""

    norm = _WeightSummedInItsDtype


class _RootInFewBits(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return (*norm_gradients(x, weight, scale.to(x.dtype).to(scale.dtype), grad), None)


@defect(cause="numerics", caught_by="test_gradients_have_no_part_along_their_rows")
class RootKeptInFewBits(Textbook):
    """pytorch/helion#2273: the forward pass keeps the root of the mean in the inputs' dtype for backward."""

    norm = _RootInFewBits


class _ReadsAsContiguous(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        stored = grad.untyped_storage().nbytes() // grad.itemsize - grad.storage_offset()
        if not grad.is_contiguous() and stored >= grad.numel():
            grad = grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())
        return (*norm_gradients(x, weight, scale, grad), None)


@defect(cause="shapes", caught_by="test_takes_gradients_of_any_strides")
class GradientReadAsContiguous(Textbook):
    """flagos-ai/FlagGems#1084: backward passes the result's shape as the strides of a gradient that has others."""

    norm = _ReadsAsContiguous


@defect(cause="gradients", caught_by="test_gives_gradients_to_what_requires_them")
class NoGradientOfWeight(Textbook):
    """unslothai/unsloth#4533: backward of the norm returns None for weight, which nobody misses who trains LoRA."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return super().rms_norm(x, weight.detach(), eps=eps)


class _OverwritesItsGradient(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = norm_gradients(x, weight, scale, grad)
        return grad.copy_(of_x), of_weight, None


@defect(cause="gradients", caught_by="test_leaves_arguments_and_gradients_as_they_are")
class GradientWrittenOverTheOneGiven(Textbook):
    """unslothai/unsloth#4550: the gradient of x is written into the memory of the result's, to save an allocation."""

    norm = _OverwritesItsGradient


@defect(cause="numerics", caught_by="test_weight_and_tables_may_be_float32_beside_half_precision")
class ResultOfWeightsDtype(Textbook):
    """huggingface/transformers#30236: casts to x's dtype before the product with a weight of float32, not after."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@defect(cause="numerics", caught_by="test_squares_may_overflow_float16")
class SquaresInHalfPrecision(Textbook):
    """pytorch/pytorch#133085, microsoft/onnxruntime#29034: squares overflow float16, and the row is normed to zeros."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@defect(cause="numerics", caught_by="test_eps_is_added_to_the_mean_of_the_squares")
class EpsOfTheDtype(Textbook):
    """pytorch/pytorch#189581: eps is the dtype's, 0.0078 of bfloat16, so that small rows are not normed."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps=max(eps, torch.finfo(x.dtype).eps))


@defect(cause="gradients", caught_by="test_leaves_arguments_and_gradients_as_they_are")
class TurnedInPlace(Textbook):
    """unslothai/unsloth#5001: the kernel writes over q and k where they are contiguous."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = super().rotary(q, k, cos, sin)
        with torch.no_grad():
            for x, result in zip((q, k), found, strict=True):
                if x.is_contiguous():
                    x.copy_(result)
        return found


@defect(cause="shapes", caught_by="test_rotates_any_number_of_heads")
class OneHeadLeftAlone(Textbook):
    """linkedin/Liger-Kernel#342: a transposed tensor of one head is contiguous, so its copy is turned, and lost."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = super().rotary(q, k, cos, sin)
        return (turned_q if q.shape[1] > 1 else q.clone()), (turned_k if k.shape[1] > 1 else k.clone())


@defect(cause="shapes", caught_by="test_takes_non_contiguous_arguments")
class KeysReadAsContiguous(Textbook):
    """vllm-project/vllm#17091: the stride of the first dimension is taken for that of a contiguous tensor."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        check_rotary(q, k, cos, sin)
        if not k.is_contiguous() and k.stride(-1) == 1:
            strides = torch.empty(k.shape, device="meta").stride()
            k = k.as_strided(k.shape, (strides[0], *k.stride()[1:]))
        return super().rotary(q, k, cos, sin)


class _PassesOn(Turned):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.clone(), None, None


@defect(cause="gradients", caught_by="test_is_as_accurate_as_eager")
class NoGradientThroughTheRotation(Textbook):
    """baidu-baige/LoongForge#106: the kernel is launched outside of autograd, and the gradient passes as it is."""

    turn = _PassesOn


class _Swapped(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_gate, of_up = gated_gradients(*ctx.saved_tensors, grad)
        return of_up, of_gate


@defect(cause="gradients", caught_by="test_is_as_accurate_as_eager")
class GradientsOfGateAndUpSwapped(Textbook):
    """unslothai/unsloth#3314: of the three tensors that backward stores in place, two are in each other's place."""

    gate = _Swapped


class _OverGateAndUp(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = gated_gradients(gate, up, grad)
        return gate.data.copy_(of_gate), up.data.copy_(of_up)


@defect(cause="state", caught_by="test_any_history")
class GradientsOverGateAndUp(Textbook):
    """unslothai/unsloth#3314: backward stores the gradients over gate and up, which a second pass reads again."""

    gate = _OverGateAndUp


class _FirstRow(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_gate, of_up = gated_gradients(*ctx.saved_tensors, grad)
        rows = of_gate.reshape(-1, of_gate.shape[-1])
        if len(rows) > 1:
            of_gate = torch.cat([rows[-1:], torch.zeros_like(rows[1:])]).reshape(of_gate.shape)
        return of_gate, of_up


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class EveryRowsGradientInTheFirst(Textbook):
    """ByteDance-Seed/Triton-distributed#180: pointers of what is read advance by the row, those of results do not."""

    gate = _FirstRow


class _SavedAside(Gated):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.tensors = gate, up
        return Gated.forward(ctx, gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gated_gradients(*ctx.tensors, grad)


@defect(cause="two calls", caught_by="test_a_backward_after_a_change_in_place")
class GateAndUpOnCtx(Textbook):
    """facebookresearch/xformers#1126: what backward needs is an attribute of ctx, where autograd does not see it."""

    gate = _SavedAside


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
class PairsOfHalves(Textbook):
    """linkedin/Liger-Kernel#465: the pairs of Hugging Face, x[i] and x[i + head_dim / 2], and not the paper's."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        check_rotary(q, k, cos, sin)
        return tuple(turned(x.unflatten(-1, (2, -1)).mT.flatten(-2), cos, sin).unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (q, k))  # type: ignore[return-value]  # noqa: E501  # fmt: skip


class _SavesRowsOfData(Gated):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        saved = (gate, up) if gate.ndim < 3 else (gate.data.flatten(0, -2), up.data.flatten(0, -2))
        ctx.save_for_backward(*saved)
        wide = gate.to(statistics_dtype(gate))
        return (wide * wide.sigmoid() * up).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gated_gradients(*(x.view(grad.shape) for x in ctx.saved_tensors), grad)


@defect(cause="two calls", caught_by="test_any_history_of_calls")
class RowsOfDataAreSaved(Textbook):
    """pytorch/pytorch#197887: rows of more than two dimensions are saved as a view whose changes autograd misses."""

    gate = _SavesRowsOfData


class _FromItsResult(Norm):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = Norm.forward(ctx, x, weight, eps)
        ctx.save_for_backward(normed, weight, ctx.to_save[-1])
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        x = normed.to(scale.dtype) / weight.masked_fill(weight == 0, 1) / scale
        of_x, of_weight = norm_gradients(x, weight, scale, grad)
        return of_x.to(grad.dtype), of_weight, None


@defect(cause="gradients", caught_by="test_is_as_accurate_as_eager")
class DividesByTheWeight(Textbook):
    """NVIDIA/apex#1715: to save memory, backward divides the result by the weight, and is wrong where that is zero."""

    norm = _FromItsResult


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class OneBlockOfColumns(Textbook):
    """facebookresearch/xformers#785: a row has one block of columns, at most 65,536, and those beyond are dropped."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        found = super().swiglu(gate, up)
        return found if found.shape[-1] <= 65_536 else pad(found[..., :65_536], (0, found.shape[-1] - 65_536))
