"""Planted defects: layers with one wrong step each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from correctness.layers.textbook import Gated, Norm, Textbook, Turned, norm_gradients, turned
from correctness.support.planting import CHECK, defect
from impl.layers import check_gated, check_norm, check_rotary


@defect(cause="numerics", caught_by="test_eps_is_added_to_the_mean_of_the_squares")
class EpsAddedToTheRoot(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)


@defect(cause="numerics", caught_by="test_a_row_of_zeros_is_normed_to_zeros")
class EpsForgotten(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps=0.0)


@defect(cause="options", caught_by="test_eps_is_added_to_the_mean_of_the_squares")
class EpsOfItsOwn(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps=1e-6)


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
class Float64ThroughFloat32(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        wide = x.dtype == torch.float64 == weight.dtype
        return (
            super().rms_norm(x.float(), weight.float(), eps=eps).double()
            if wide
            else super().rms_norm(x, weight, eps=eps)
        )


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class ColumnsBeyondABlockNotSquared(Textbook):
    """A block has at most 1,024 columns, and the sum of the squares stops there."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide[..., :1024].square().sum(-1, keepdim=True) / x.shape[-1]
        return (wide * torch.rsqrt(mean + eps) * weight).to(x.dtype)


class _RowsOfPrograms(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = norm_gradients(x, weight, scale, grad)
        rows = x.numel() // x.shape[-1]
        if rows > 256:
            each = rows // 256 * 256
            flat = (y.reshape(-1, y.shape[-1])[:each] for y in (x, scale, grad))
            narrow, narrow_scale, narrow_grad = flat
            _, of_weight = norm_gradients(narrow, weight, narrow_scale, narrow_grad)
        return of_x, of_weight, None


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class RowsBeyondWholeRoundsLeftOut(Textbook):
    """Each of 256 programs takes as many rows, and rows that remain add nothing to weight's gradient."""

    norm = _RowsOfPrograms


class _MeanForgotten(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        _, of_weight = norm_gradients(x, weight, scale, grad)
        return (grad.to(scale.dtype) * weight * scale).to(x.dtype), of_weight, None


@defect(cause="gradients", caught_by="test_is_as_accurate_as_eager")
class ScaleTakenForAConstant(Textbook):
    norm = _MeanForgotten


@defect(cause="gradients", caught_by="test_one_result_may_be_used_alone")
class SumWithoutGradient(Textbook):
    """A kernel's second result, which its Function returns as a constant."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = super().add_rms_norm(x, residual, weight, eps=eps)
        return normed, total.detach() + 0 * x


@defect(cause="gradients", caught_by="test_results_are_no_views_of_arguments")
class SumIntoTheResidual(Textbook):
    """Adds in place where no gradients are wanted, as inference engines do."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return super().add_rms_norm(x, residual, weight, eps=eps)
        check_norm(x, weight, residual)
        residual += x
        return self.rms_norm(residual, weight, eps=eps), residual


@defect(cause="numerics", caught_by="test_sums_over_a_row_are_in_float32")
class MeanInHalfPrecision(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = torch.zeros_like(x[..., :1])
        for part in wide.square().split(8, -1):
            total += part.sum(-1, keepdim=True).to(x.dtype)
        return (wide * torch.rsqrt(total.to(wide.dtype) / x.shape[-1] + eps) * weight).to(x.dtype)


@defect(cause="numerics", caught_by="test_swiglu_of_large_numbers_does_not_overflow")
class ExponentialsDivided(Textbook):
    """exp(gate) / (1 + exp(gate)) is NaN where the exponential overflows."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        check_gated(gate, up)
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (wide * (wide.exp() / (1 + wide.exp())) * up).to(gate.dtype)


@defect(cause="numerics", caught_by=CHECK)
class GeluForSilu(Textbook):
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        check_gated(gate, up)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


@defect(cause="numerics", caught_by="test_autocast_changes_nothing")
class AutocastsDtype(Textbook):
    """A Function with `custom_fwd` casts what it gets to autocast's dtype."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        device = gate.device.type
        if torch.is_autocast_enabled(device):
            to = torch.get_autocast_dtype(device)
            return super().swiglu(gate.to(to), up.to(to)).to(gate.dtype)
        return super().swiglu(gate, up)


class _IntoOneBuffer(Gated):
    kept: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        result = Gated.forward(ctx, gate, up)
        return _IntoOneBuffer.kept.setdefault((gate.shape, gate.dtype), torch.empty_like(result)).copy_(result)


@defect(cause="two calls", caught_by="test_results_stay_while_other_calls_run")
class ResultsInOneBuffer(Textbook):
    """A buffer for each shape, which the next call of that shape overwrites."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        check_gated(gate, up)
        return _IntoOneBuffer.apply(gate, up).view_as(gate)


@defect(cause="memory", caught_by="test_calls_leave_nothing_behind")
class KeepsItsLargestBuffer(Textbook):
    kept: list[Tensor] = []  # noqa: RUF012

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.kept or self.kept[0].numel() < gate.numel():
            self.kept[:] = [torch.empty(gate.shape, device=gate.device)]
        return super().swiglu(gate, up)


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class AnglesFromTheSecondPosition(Textbook):
    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotary(q, k, cos.roll(-1, 0), sin.roll(-1, 0))


@defect(cause="shapes", caught_by="test_rotates_any_number_of_heads")
class AsManyKeysAsQueries(Textbook):
    """One kernel for both counts the heads of q."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = super().rotary(q, k, cos, sin)
        heads = q.shape[1]
        return turned_q, torch.cat([turned_k[:, :heads], k[:, heads:]], 1)


class _NotBack(Turned):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return turned(grad, *ctx.saved_tensors), None, None


@defect(cause="gradients", caught_by="test_is_as_accurate_as_eager")
class GradientTurnedOn(Textbook):
    turn = _NotBack


_tables: dict[Any, tuple[Tensor, Tensor]] = {}


@defect(cause="two calls", caught_by="test_the_same_tensors_changed_in_place_give_other_results")
class TablesKeptByShape(Textbook):
    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        check_rotary(q, k, cos, sin)
        kept = _tables.setdefault((cos.data_ptr(), cos.shape, cos.dtype), (cos.clone(), sin.clone()))
        return super().rotary(q, k, *kept)


@defect(cause="errors", caught_by="test_shapes_that_do_not_go_together_are_refused")
class BroadcastsItsArguments(Textbook):
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up


class _Twice(Norm):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = (each.detach() for each in ctx.saved_tensors)
        return (*norm_gradients(x, weight, scale, grad), None)


@defect(cause="gradients", caught_by="test_a_second_derivative")
class SecondDerivativeOfConstants(Textbook):
    norm = _Twice


@defect(cause="numerics", caught_by="test_any_history_of_calls")
class RotatesInFloat16(Textbook):
    """bfloat16 in a kernel of float16, which lacks its large and its small numbers."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.half().to(x.dtype) if x.dtype == torch.bfloat16 else x for x in (q, k))
        return super().rotary(q, k, cos, sin)


@defect(cause="shapes", caught_by="test_takes_non_contiguous_arguments")
class KeysReadByTheStrideOfQueries(Textbook):
    """sgl-project/sglang#20598: heads of q and of k are as far apart for the kernel as those of q are."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        check_rotary(q, k, cos, sin)
        return super().rotary(q, k.as_strided(k.shape, (k.stride(0), q.stride(1), *k.stride()[2:])), cos, sin)
