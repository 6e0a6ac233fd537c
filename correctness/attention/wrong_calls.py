"""Planted defects: a call changes what another call keeps."""

import math
from typing import Any

import torch
from torch import Tensor

from correctness.attention.textbook import Flash, checked, flash_backward, flash_forward, future, scores_of
from correctness.support.planting import defect
from impl.attention import check_inputs, eager_attention


@defect(cause="two calls", caught_by="test_two_forwards_before_either_backward")
class LogSumExpInAWorkspace(Flash):
    """All calls of one shape share one buffer."""

    workspaces: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        key = lse.shape, lse.dtype, lse.device
        ctx.lse = LogSumExpInAWorkspace.workspaces.setdefault(key, torch.empty_like(lse)).copy_(lse)
        ctx.save_for_backward(q, k, v, out)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, ctx.lse, grad, ctx.is_causal), None


@defect(cause="two calls", caught_by="test_results_stay_while_other_calls_run")
class GradientsInAWorkspace(Flash):
    workspaces: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kept = GradientsInAWorkspace.workspaces
        gradients = []
        for name, x in zip("qkv", flash_backward(*ctx.saved_tensors, grad, ctx.is_causal), strict=True):
            gradients.append(kept.setdefault((name, x.shape, x.dtype), torch.empty_like(x)).copy_(x))
        return *gradients, None


_outputs: dict[Any, Tensor] = {}


@defect(cause="two calls", caught_by="test_results_stay_while_other_calls_run")
def output_in_a_workspace(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Reuses its output's memory if no gradient is needed, as in generation."""
    out = eager_attention(q, k, v, is_causal=is_causal)
    if out.requires_grad:
        return out
    key = out.shape, out.dtype
    return _outputs.setdefault(key, torch.empty_like(out)).copy_(out)


@defect(cause="two calls", caught_by="test_two_forwards_before_either_backward")
class MaskOfTheLastCall(Flash):
    is_causal = False

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        MaskOfTheLastCall.is_causal = is_causal
        return Flash.forward(ctx, q, k, v, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, MaskOfTheLastCall.is_causal), None


_masks: dict[Any, Tensor] = {}


@defect(cause="two calls", caught_by="test_calls_of_other_shapes_and_dtypes_between")
def mask_kept_by_length(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Caches the mask by the number of scores, not by their shape."""
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k)
    if is_causal:
        mask = _masks.setdefault(q.shape[-2] * k.shape[-2], future(q, k))
        scores = scores.masked_fill(mask.reshape(q.shape[-2], k.shape[-2]), -math.inf)
    return scores.softmax(-1) @ v


@defect(cause="two calls", caught_by="test_the_same_tensors_changed_in_place")
class LogSumExpKeptByAddress(Flash):
    kept: dict[Any, tuple[Tensor, Tensor]] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        key = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, k.shape, q.dtype, is_causal
        kept = LogSumExpKeptByAddress.kept
        if list(kept) != [key]:
            kept.clear()
            kept[key] = flash_forward(q, k, v, is_causal)
        out, lse = kept[key][0].clone(), kept[key][1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out


@defect(cause="two calls", caught_by="test_the_same_tensors_changed_in_place_give_other_results")
def keys_kept_with_the_tensor(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """If nothing needs a gradient, caches keys and values on the tensor k: after an in-place write it uses the old
    ones."""
    if torch.is_grad_enabled() and k.requires_grad:
        return eager_attention(q, k, v, is_causal=is_causal)
    kept: Any = k
    if not hasattr(kept, "kept"):
        kept.kept = k.clone(), v.clone()
    return eager_attention(q, *kept.kept, is_causal=is_causal)


@defect(cause="two calls", caught_by="test_trains_on_what_it_was_first_evaluated_on")
def keeps_the_mask_of_an_evaluation(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Caches the mask of an evaluation: autograd cannot save a mask made under inference_mode."""
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k)
    if is_causal:
        mask = _masks.setdefault((q.shape[-2], k.shape[-2]), future(q, k))
        scores = torch.where(mask, -math.inf, scores)
    return scores.softmax(-1) @ v


@defect(cause="two calls", caught_by="test_a_backward_after_a_change_in_place")
class KeysOnCtx(Flash):
    """Keeps k as an attribute of ctx, where autograd does not see that it has changed in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, v, out, lse)
        ctx.k, ctx.is_causal = k, is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, v, *rest = ctx.saved_tensors
        return *flash_backward(q, ctx.k, v, *rest, grad, ctx.is_causal), None


class _OfConstantValues(torch.autograd.Function):
    """The product of weights and values; backward takes the values for constants."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(weights, v)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, v = ctx.saved_tensors
        return grad @ v.detach().mT, weights.mT @ grad


@defect(cause="gradients", caught_by="test_a_second_derivative")
def values_are_constants_of_a_gradient(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """A second derivative lacks what comes by v."""
    if q.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return eager_attention(q, k, v, is_causal=is_causal)
    q, k, v = checked(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = scores_of(q.to(wide), k.to(wide), is_causal).softmax(-1)
    out: Tensor = _OfConstantValues.apply(weights, v.to(wide))
    return out.to(q.dtype)


@defect(cause="memory", caught_by="test_calls_leave_nothing_behind")
class ClearedByBackward(Flash):
    """A table has what backward needs, which takes it out; a forward whose backward never runs leaves it there."""

    kept: dict[int, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = Flash.forward(ctx, q, k, v, is_causal)
        ctx.number = max(ClearedByBackward.kept, default=0) + 1
        if any(ctx.needs_input_grad):
            ClearedByBackward.kept[ctx.number] = out.detach().clone()
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ClearedByBackward.kept.pop(ctx.number, None)
        return Flash.backward(ctx, grad)


@defect(cause="options", caught_by="test_leaves_its_inputs_as_they_are")
def switches_kernels_off_for_good(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Switches off a kernel of SDPA for itself, and for all who follow."""
    torch.backends.cuda.enable_flash_sdp(False)
    return eager_attention(q, k, v, is_causal=is_causal)


class _TwiceDifferentiable(Flash):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, ctx.is_causal), None


@defect(cause="gradients", caught_by="test_a_second_derivative")
def queries_alone_have_another_backward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """pytorch/pytorch#76185: a Function for queries alone (of frozen keys) lacks `once_differentiable`."""
    return (Flash if k.requires_grad or v.requires_grad else _TwiceDifferentiable).apply(q, k, v, is_causal)


@defect(cause="gradients", caught_by="test_leaves_results_of_other_operations_as_they_are")
class GradientsInPlaceOfActivations(Flash):
    """As linkedin/Liger-Kernel#1251 has it of a loss: the gradient of q is written into q, where that is no leaf, and
    the operation that made q may have saved it."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, (of_q, *others) = ctx.saved_tensors[0], Flash.backward(ctx, grad)
        free = not q.is_leaf and q.is_contiguous()
        return (q.data.copy_(of_q) if free else of_q), *others


_SCALES: dict[str, Tensor] = {}


@defect(cause="two calls", caught_by="test_is_right_unwatched")
def scales_made_in_the_first_call(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """sgl-project/sglang#33470: a first call in inference mode makes and keeps a tensor that no later one may save for
    backward."""
    check_inputs(q, k, v)
    one = _SCALES.setdefault(q.device.type, torch.ones((), device=q.device))
    return eager_attention(q * one.to(q.dtype), k, v, is_causal=is_causal)


@defect(cause="two calls", caught_by="test_any_history_of_calls")
def scale_kept_for_each_shape(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Keeps the scale in the dtype of the first call's products: later calls outside of autocast have it rounded."""
    check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5
    casts = torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype(q.device.type) if casts else q.dtype
    with torch.inference_mode(False):
        factor = torch.tensor(scale, dtype=dtype, device=q.device)
    kept = _SCALES_BY_SHAPE.setdefault((q.shape, k.shape, q.dtype), factor)
    return eager_attention(q * (kept.to(q.dtype) / scale), k, v, is_causal=is_causal)  # eager scales once more


_SCALES_BY_SHAPE: dict[Any, Tensor] = {}


@defect(cause="two calls", caught_by="test_any_history_of_calls")
def versions_are_noted(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Notes what it has seen by its version, which tensors that were made in inference mode do not have."""
    check_inputs(q, k, v)
    _VERSIONS["k and v"] = k._version, v._version
    return eager_attention(q, k, v, is_causal=is_causal)


_VERSIONS: dict[str, tuple[int, int]] = {}
