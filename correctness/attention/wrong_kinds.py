"""Planted defects: attention that is right of the inputs, and in the use, that first tests have."""

import math
from typing import Any

import torch
from torch import Tensor

from correctness.attention.textbook import Flash, checked, flash_backward, flash_forward, future
from correctness.support.planting import defect
from impl.attention import check_inputs, eager_attention, kv_group


@defect(cause="numerics", caught_by="test_large_scores_of_half_precision_are_exact")
def maximum_from_a_finite_number(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """flashinfer-ai/flashinfer#4267: a kernel for half precision begins the largest product of a row at -50,000."""
    if q.dtype.itemsize > 2:
        return eager_attention(q, k, v, is_causal=is_causal)
    dtype = q.dtype
    q, k, v = (x.float() for x in checked(q, k, v))
    products = q @ k.mT
    if is_causal:
        products = products.masked_fill(future(q, k), -math.inf)
    largest = products.amax(-1, keepdim=True).clamp(min=-5e4)
    weights = ((products - largest) / math.sqrt(q.shape[-1])).exp()
    return (weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-30)).to(dtype)


@defect(cause="numerics", caught_by="test_large_scores_do_not_overflow")
def maximum_in_few_bits(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """pytorch/pytorch#121558: the largest score of a row is rounded to the inputs' dtype, and may be far below it."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in checked(q, k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(is_causal * future(q, k), -math.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).to(dtype)).exp()
    return (weights @ v / weights.sum(-1, keepdim=True)).to(dtype)


@defect(cause="shapes", caught_by="test_takes_non_contiguous_inputs")
def rows_of_heads_alone(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Where heads lie side by side, rows are taken to lie as far apart as all heads are wide; in a projection of q, k
    and v they lie further apart."""
    check_inputs(q, k, v)

    def read(x: Tensor) -> Tensor:
        if x.ndim < 3 or x.stride(-1) != 1 or x.stride(-3) != x.shape[-1] or min(x.shape) < 2:
            return x
        strides = (*x.stride()[:-2], min(x.shape[-3] * x.shape[-1], x.stride(-2)), 1)
        return x + (x.detach().as_strided(x.shape, strides) - x.detach())

    return eager_attention(read(q), read(k), read(v), is_causal=is_causal)


class _SumToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad.sum(-3, keepdim=True), torch.zeros_like(grad[..., 1:, :, :])], dim=-3)


@defect(cause="shapes", caught_by="test_takes_non_contiguous_inputs")
def one_for_all_heads_gets_the_sum(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Where keys and values are expanded over heads, the first head gets the gradients of all."""
    check_inputs(q, k, v)
    if k.ndim > 2 and k.shape[-3] > 1 and k.stride(-3) == v.stride(-3) == 0:
        k, v = _SumToFirst.apply(k), _SumToFirst.apply(v)
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_takes_grouped_query_heads")
def sixteen_heads_of_a_group(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """A tile holds 16 heads of a group, and there is one tile for each group."""
    out = eager_attention(q, k, v, is_causal=is_causal)
    if (group := kv_group(q, k)) <= 16:
        return out
    return out * (torch.arange(q.shape[-3], device=q.device) % group < 16).view(-1, 1, 1)


@defect(cause="shapes", caught_by="test_more_than_65536_of_them")
def sequences_beyond_a_grid(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """flashinfer-ai/flashinfer#3125: the batch is a grid's third dimension, which ends at 65,535."""
    out = eager_attention(q, k, v, is_causal=is_causal)
    if q.ndim != 4 or len(q) < 65_536:
        return out
    return torch.cat([out[:65_535], torch.zeros_like(out[65_535:])])


@defect(cause="gradients", caught_by="test_a_backward_after_a_change_in_place_is_right_or_an_error")
class OutputBesideAutograd(Flash):
    """Keeps an alias of the output on ctx: a gate that multiplies it in place changes q's and k's gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, lse)
        ctx.out, ctx.is_causal = out.detach(), is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *qkv, lse = ctx.saved_tensors
        return *flash_backward(*qkv, ctx.out, lse, grad, ctx.is_causal), None


@defect(cause="state", caught_by="test_any_history_of_calls")
class FirstGradientsAgain(Flash):
    """A second backward pass, as of a Jacobian's next row, gets the first one's gradients."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not hasattr(ctx, "kept"):
            ctx.kept = flash_backward(*ctx.saved_tensors, grad, ctx.is_causal)
        return *(x.clone() for x in ctx.kept), None


@defect(cause="state", caught_by="test_any_history_of_calls")
class SavesMoreTheFirstTime(Flash):
    """Saves one tensor more in the first call of a shape: checkpointing compares what both runs of forward save."""

    seen: set[Any] = set()  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        again, seen = (q.shape, k.shape), SavesMoreTheFirstTime.seen
        ctx.save_for_backward(q, k, v, out, lse, *([] if again in seen else [lse.clone()]))
        seen.add(again)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors[:5], grad, ctx.is_causal), None


@defect(cause="numerics", caught_by="test_any_history_of_calls")
def values_as_two_numbers_of_float16(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Splits float32 into two numbers of half precision, for its fast products: 65,504 is the largest."""
    if q.dtype != torch.float32:
        return eager_attention(q, k, v, is_causal=is_causal)
    high = v.detach().half().float()
    split = high + ((v.detach() - high) * 4096).half().float() / 4096
    return eager_attention(q, k, v + (split - v.detach()), is_causal=is_causal)


@defect(cause="numerics", caught_by="test_any_history_of_calls")
def scale_of_the_default_dtype(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """The scale is a tensor of torch's default dtype, which a job may have set to bfloat16."""
    check_inputs(q, k, v)
    if torch.get_default_dtype() == torch.float32:
        return eager_attention(q, k, v, is_causal=is_causal)
    scale = torch.tensor(q.shape[-1] ** -0.5).double().item() * q.shape[-1] ** 0.5
    return eager_attention(q * scale, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_takes_grouped_query_heads")
def keys_of_the_first_parts(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """One query of grouped heads splits its keys into 8 parts of 256, and those beyond are dropped."""
    check_inputs(q, k, v)
    if q.shape[-2] == 1 and kv_group(q, k) > 1:
        k, v = k[..., :2048, :], v[..., :2048, :]
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_takes_offsets_beyond_32_bits")
def offsets_of_32_bits(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """A row's number times its stride is a number of 32 bits: rows beyond are read from elsewhere."""
    check_inputs(q, k, v)
    rows = torch.arange(k.shape[-2], device=k.device) * k.stride(-2) < 2**31
    return eager_attention(q, k, v * rows[:, None], is_causal=is_causal)


class _SavesWeightsOfGroups(Flash):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = Flash.forward(ctx, q, k, v, is_causal)
        if kv_group(q, k) > 1:
            ctx.save_for_backward(*ctx.to_save, q.new_empty(*q.shape[:-1], k.shape[-2]))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors[:5], grad, ctx.is_causal), None


@defect(cause="memory", caught_by="test_nothing_quadratic_is_held_until_backward")
class MathOfGroups(_SavesWeightsOfGroups):
    """Grouped heads go to the path that saves the weights."""


class _GroupsSummedAside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, _ = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        of_q, of_k, of_v = flash_backward(q, k, v, *flash_forward(q, k, v, ctx.is_causal), grad, ctx.is_causal)
        grouped = kv_group(q, k) > 1
        return of_q, of_k.detach() if grouped else of_k, of_v.detach() if grouped else of_v, None


@defect(cause="gradients", caught_by="test_a_second_derivative")
class GroupsSummedWithoutAGraph(_GroupsSummedAside):
    """A kernel that autograd does not see sums a group's gradients: their own gradients are zero, without an error."""


_splits: dict[Any, Tensor] = {}


@defect(cause="memory", caught_by="test_a_large_call_leaves_nothing_behind")
def splits_kept_by_size(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """One query's keys are split, and the parts of its output lie in a workspace that stays."""
    check_inputs(q, k, v)
    if q.shape[-2] == 1 < k.shape[-2]:
        _splits.setdefault((q.shape, k.shape, q.dtype), torch.empty(8, *q.shape, device=q.device))
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_takes_offsets_beyond_32_bits")
def sequences_in_32_bits(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """A row's offset is in 64 bits, and that of its sequence in 32."""
    check_inputs(q, k, v)
    if v.ndim > 3:
        near = torch.arange(v.shape[0], device=v.device) * v.stride(0) < 2**31
        v = v * near.view(-1, *[1] * (v.ndim - 1))
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_takes_non_contiguous_inputs")
class GradientsByTheStridesOfInputs(Flash):
    """Gradients get the strides of their inputs: rows of windows that overlap share memory, which theirs may not."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        of = flash_backward(*ctx.saved_tensors, grad, ctx.is_causal)
        laid = (
            g if 0 in x.stride() else torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=g.device).copy_(g)
            for x, g in zip(ctx.saved_tensors, of, strict=False)
        )
        return *laid, None


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def three_leading_dims(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """A grid has three dimensions: of leading dims beyond them only the first index is computed."""
    found = eager_attention(q, k, v, is_causal=is_causal)
    if q.ndim <= 5 or not q.numel():
        return found
    first = found.flatten(0, -5)[:1]
    return torch.cat([first, torch.zeros_like(found.flatten(0, -5)[1:])]).reshape(found.shape)
