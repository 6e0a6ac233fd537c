"""Planted defects: layers that are right of the inputs, and in the use, that first tests have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from correctness.layers.textbook import Gated, Norm, Textbook, gated_gradients, norm_gradients
from correctness.support.planting import defect
from impl.layers import check_norm, statistics_dtype


@defect(cause="shapes", caught_by="test_takes_non_contiguous_arguments")
class ResidualByTheStridesOfX(Textbook):
    """NVIDIA/TensorRT-LLM#14810: the row stride of x is that of the residual too, as long as its columns are
    contiguous."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        check_norm(x, weight, residual)
        residual = residual if residual.ndim > 1 and residual.stride(-1) == 1 == x.stride(-1) else residual.contiguous()
        read = residual.detach()
        if residual.stride(-1) == 1 and x.ndim > 1 and x.numel():
            memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(residual.untyped_storage())
            strides = (*residual.stride()[:-2], x.stride(-2), 1)
            last = residual.storage_offset() + sum((n - 1) * by for n, by in zip(x.shape, strides, strict=True))
            memory = torch.nn.functional.pad(memory, (0, max(0, last + 1 - memory.numel())))
            read = memory.as_strided(x.shape, strides, residual.storage_offset())
        return super().add_rms_norm(x, residual + (read - residual.detach()), weight, eps=eps)


class _OfAnotherRow(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = norm_gradients(x, weight, scale, grad)
        if scale.numel() >= 1024 and x.shape[-1] < 64:
            wide, of_normed = x.to(scale.dtype) * scale, grad.to(scale.dtype) * weight
            of_x = (scale * (of_normed - wide * (of_normed * wide).mean(-1, keepdim=True).roll(1, -2))).to(x.dtype)
        return of_x, of_weight, None


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
class MeansOfOtherRows(Textbook):
    """BobMcDear/attorch#17: of 1,024 narrow rows and more, programs take several rows each, and each row gets the mean
    of another."""

    norm = _OfAnotherRow


@defect(cause="shapes", caught_by="test_more_rows_than_16_bits_count")
class RowsOfAGrid(Textbook):
    """A grid has 65,535 programs in its second dimension."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        found = super().swiglu(gate, up)
        rows = torch.arange(found.numel() // max(1, found.shape[-1]), device=found.device) if found.ndim else found
        return found * (rows < 65_535).view(*found.shape[:-1], 1) if found.ndim > 1 else found


@defect(cause="shapes", caught_by="test_takes_any_leading_dimensions")
class TwoSequences(Textbook):
    """The programs of a third sequence find no sequence of theirs."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = super().rotary(q, k, cos, sin)
        first, second = (torch.cat([x[:2], given[2:]]) for x, given in zip(rotated, (q, k), strict=True))
        return first, second


@defect(cause="options", caught_by="test_eps_is_added_to_the_mean_of_the_squares")
class EpsOfZeroIsNone(Textbook):
    """`eps or 1e-6`."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps=eps or 1e-6)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        wide = total.to(statistics_dtype(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.total = total.detach()
        ctx.save_for_backward(weight, scale)
        return (wide * scale * weight).to(x.dtype), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, of_total: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        weight, scale = ctx.saved_tensors
        of_sum, of_weight = norm_gradients(ctx.total, weight, scale, grad)
        return of_sum + of_total, of_sum + of_total, of_weight, None


@defect(cause="gradients", caught_by="test_a_backward_after_a_change_in_place_is_right_or_an_error")
class SumOnCtx(Textbook):
    """The sum is a result and an attribute of ctx: the block that adds to it in place changes the norm's gradient."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        check_norm(x, weight, residual)
        with torch.autocast(x.device.type, enabled=False):
            return _Sum.apply(x, residual, weight, eps)


class _KeepsItsGradients(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        if not hasattr(ctx, "kept"):
            ctx.kept = gated_gradients(*ctx.saved_tensors, grad)
        return tuple(x.clone() for x in ctx.kept)


@defect(cause="state", caught_by="test_any_history_of_calls")
class FirstGradientsAgain(Textbook):
    """A second backward pass, as of a Jacobian's next row, gets the first one's gradients."""

    gate = _KeepsItsGradients


@defect(cause="numerics", caught_by="test_another_default_dtype_changes_nothing")
class EpsOfTheDefaultDtype(Textbook):
    """eps becomes a tensor of torch's default dtype, which a job may have set to bfloat16."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        narrow = torch.get_default_dtype() is torch.bfloat16  # in float32 the tests' eps lose digits of their own
        return super().rms_norm(x, weight, eps=torch.tensor(eps).item() if narrow else eps)


@defect(cause="two calls", caught_by="test_results_stay_while_other_calls_run")
class ResultsInTheInstancesBuffer(Textbook):
    """Without gradients results lie in a workspace that belongs to the object, one for each shape."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        found = super().swiglu(gate, up)
        if found.requires_grad:
            return found
        return self.kept.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found)


class _SigmoidSaved(Gated):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        wide = gate.to(statistics_dtype(gate))
        ctx.save_for_backward(gate, up, wide.sigmoid())
        return (wide * wide.sigmoid() * up).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, sigmoid = ctx.saved_tensors
        of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return of_gate.to(gate.dtype), (grad * gate * sigmoid).to(up.dtype)


@defect(cause="gradients", caught_by="test_a_second_derivative")
class SigmoidTakenForAConstant(Textbook):
    """Backward can be differentiated, and what forward saved for it has no graph: the second derivative of gate alone
    is wrong."""

    gate = _SigmoidSaved


class _FrozenWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        normed = Norm.forward(ctx, total, weight, eps)
        return normed, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, of_total: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        of_sum, of_weight = norm_gradients(*ctx.saved_tensors, grad)
        of_x, _, learns = ctx.needs_input_grad[:3]
        of_sum = of_sum + of_total
        return of_sum, of_sum.clone() if learns or not of_x else None, of_weight, None


@defect(cause="gradients", caught_by="test_gives_gradients_to_what_requires_them")
class OneGradientWhereTheWeightIsFrozen(Textbook):
    """Where weight needs no gradient, as in LoRA, another kernel runs, and its gradient goes to x alone."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        check_norm(x, weight, residual)
        with torch.autocast(x.device.type, enabled=False):
            return _FrozenWeight.apply(x, residual, weight, eps)


class _ProductInHalf(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        _, of_weight = norm_gradients(x, weight, scale, grad)
        of_x, _ = norm_gradients(x, torch.ones_like(weight), scale, grad * weight)
        return of_x, of_weight, None


@defect(cause="numerics", caught_by="test_gradients_times_weight_may_overflow_float16")
class GradientTimesWeightInHalf(Textbook):
    """The gradient's product with weight is in the inputs' dtype, and overflows under a loss scale."""

    norm = _ProductInHalf


@defect(cause="two calls", caught_by="test_the_same_tensors_changed_in_place_give_other_results")
class WideWeightKeptByVersion(Textbook):
    """An evaluation keeps a copy of weight in float32 as long as its version stays: `.data` changes no version."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if torch.is_grad_enabled() or weight.itemsize > 2 or x.dtype != weight.dtype:
            return super().rms_norm(x, weight, eps=eps)
        check_norm(x, weight)
        kept = getattr(weight, "wide", None)
        if kept is None or kept[0] != weight._version:
            kept = weight.wide = weight._version, weight.float()  # type: ignore[attr-defined]
        return super().rms_norm(x.detach(), kept[1], eps=eps)


class _LaidAsItsArguments(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        of = gated_gradients(*ctx.saved_tensors, grad)
        return tuple(
            g if 0 in x.stride() else torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=g.device).copy_(g)
            for x, g in zip(ctx.saved_tensors, of, strict=True)
        )


@defect(cause="shapes", caught_by="test_takes_non_contiguous_arguments")
class GradientsByTheStridesOfArguments(Textbook):
    """Gradients get the strides of their arguments: rows of windows that overlap share memory, which theirs may not."""

    gate = _LaidAsItsArguments


class _InPlaceOfItsArguments(Gated):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        of = gated_gradients(gate, up, grad)
        free = not gate.is_leaf and gate.is_contiguous()
        return (gate.data.copy_(of[0]), *of[1:]) if free else of


@defect(cause="two calls", caught_by="test_leaves_results_of_other_operations_as_they_are")
class GradientsInPlaceOfActivations(Textbook):
    """linkedin/Liger-Kernel#254: a gradient is written into its activation, which an operation may have saved."""

    gate = _InPlaceOfItsArguments


class _TwiceDifferentiable(Norm):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*norm_gradients(*ctx.saved_tensors, grad), None)


@defect(cause="gradients", caught_by="test_a_second_derivative")
class AnotherBackwardOfXAlone(Textbook):
    """pytorch/pytorch#76185: a Function for a frozen weight lacks `once_differentiable`: its scale is a constant."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if weight.requires_grad:
            return super().rms_norm(x, weight, eps=eps)
        check_norm(x, weight)
        return _TwiceDifferentiable.apply(x, weight, eps)


@defect(cause="two calls", caught_by="test_any_history_of_calls")
class VersionsAreNoted(Textbook):
    """Notes the gate's version, which tensors that were made in inference mode do not have."""

    version = 0

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        found = super().swiglu(gate, up)
        VersionsAreNoted.version = gate._version
        return found
