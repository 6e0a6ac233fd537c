"""Planted defects: attention with one wrong step each."""

import math
from typing import Any

import torch
from torch import Tensor

from correctness.attention.textbook import Flash, checked, flash_backward, future, scores_of
from correctness.support.planting import defect
from impl.attention import check_inputs, eager_attention, kv_group


@defect(cause="masks", caught_by="test_a_query_sees_the_keys_up_to_its_own")
def mask_off_by_one(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Each query sees one key too many."""
    q, k, v = checked(q, k, v)
    return scores_of(q, k).masked_fill(is_causal * future(q, k, 2), -math.inf).softmax(-1) @ v


@defect(cause="masks", caught_by="test_a_query_sees_the_keys_up_to_its_own")
def positions_in_the_inputs_dtype(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Computes positions in the inputs' dtype: bfloat16 cannot represent 257, nor float16 2,049."""
    q, k, v = checked(q, k, v)
    rows, columns = (torch.arange(x.shape[-2], device=q.device).to(q.dtype) for x in (q, k))
    return scores_of(q, k).masked_fill(is_causal * (columns > rows[:, None]), -math.inf).softmax(-1) @ v


@defect(cause="masks", caught_by="test_is_as_accurate_as_eager")
class NoMaskInBackward(Flash):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, False), None


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def keys_beyond_whole_tiles_left_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Drops the keys of the last, partial tile if there are several tiles of 1,024."""
    check_inputs(q, k, v)
    if k.shape[-2] > 1024:
        whole = k.shape[-2] // 1024 * 1024
        k, v = k[..., :whole, :], v[..., :whole, :]
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def columns_beyond_128_left_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = checked(q, k, v)
    scores = scores_of(q[..., :128], k[..., :128], is_causal) * math.sqrt(min(128, q.shape[-1]) / q.shape[-1])
    return scores.softmax(-1) @ v


@defect(cause="shapes", caught_by="test_takes_grouped_query_heads")
def heads_repeated_in_the_wrong_order(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """apple/axlearn#842: query head h attends to head h modulo the heads of k."""
    check_inputs(q, k, v)
    if (group := kv_group(q, k)) > 1:
        k, v = (torch.cat([x] * group, dim=-3) for x in (k, v))
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
def float64_through_float32(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    return eager_attention(q.float(), k.float(), v.float(), is_causal=is_causal).to(q.dtype)


@defect(cause="numerics", caught_by="test_takes_grouped_query_heads")
def grouped_float64_through_float32(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Computes in float32 for grouped heads only."""
    check_inputs(q, k, v)
    if kv_group(q, k) == 1:
        return eager_attention(q, k, v, is_causal=is_causal)
    return eager_attention(q.float(), k.float(), v.float(), is_causal=is_causal).to(q.dtype)


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
def tiles_summed_in_the_inputs_dtype(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Rounds sums and products of 16 keys at a time to half precision."""
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k, is_causal)
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    total = sum(part @ rows for part, rows in zip(exps.split(16, -1), v.split(16, -2), strict=True))
    return total / sum(part.sum(-1, keepdim=True) for part in exps.split(16, -1))


@defect(cause="numerics", caught_by="test_large_scores_do_not_overflow")
def no_maximum_subtracted(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = checked(q, k, v)
    exps = scores_of(q, k, is_causal).clamp(max=math.log(torch.finfo(q.dtype).max) - 8).exp()
    return exps / exps.sum(-1, keepdim=True) @ v


@defect(cause="numerics", caught_by="test_what_is_added_to_every_score_changes_nothing")
def running_maximum_from_zero(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k, is_causal)
    exps = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
    return exps / (exps.sum(-1, keepdim=True) + 1e-20) @ v


@defect(cause="memory", caught_by="test_nothing_quadratic")
class ProbabilitiesOnTheContext(Flash):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = Flash.forward(ctx, q, k, v, is_causal)
        ctx.scores = scores_of(*checked(q, k, v)[:2])
        return out


@defect(cause="gradients", caught_by="test_leaves_its_inputs_as_they_are")
class ScalesTheOutputsGradientInPlace(Flash):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = grad.contiguous().mul_(0.5)
        return *flash_backward(*ctx.saved_tensors, 2 * grad, ctx.is_causal), None


@defect(cause="gradients", caught_by="test_gives_gradients_to_the_inputs_that_require_them")
class NoGradientsUnlessOfQueries(Flash):
    """Returns zero gradients of k and v if q needs none, for example because the query projection is frozen."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[0]:
            return None, *(torch.zeros_like(x) for x in ctx.saved_tensors[1:3]), None
        return *flash_backward(*ctx.saved_tensors, grad, ctx.is_causal), None


@defect(cause="gradients", caught_by="test_a_second_derivative")
class SecondDerivativeWithoutLogSumExp(Flash):
    """Lets autograd differentiate a backward that treats the log-sum-exp as a constant."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, ctx.is_causal), None


@defect(cause="gradients", caught_by="test_takes_any_layout_of_the_outputs_gradient")
class OutputsGradientByItsMemory(Flash):
    """Reads the output's gradient as if it were contiguous; after `.sum()` or a transpose it is not."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        memory = torch.empty(0, dtype=grad.dtype, device=grad.device).set_(grad.untyped_storage())
        read = memory.repeat(-(-grad.numel() // memory.numel()))[: grad.numel()].view(grad.shape)
        return *flash_backward(*ctx.saved_tensors, read, ctx.is_causal), None


@defect(cause="options", caught_by="test_is_causal_only_where_asked")
def causal_by_default(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="numerics", caught_by="test_gives_the_same_output_without_gradients")
def half_precision_without_gradients(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    check_inputs(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return eager_attention(q, k, v, is_causal=is_causal)
    return eager_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=is_causal).to(q.dtype)


@defect(cause="errors", caught_by="test_shapes_that_do_not_go_together")
def lengths_of_k_and_v_cut_to_the_shorter(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    keys = min(k.shape[-2], v.shape[-2]) if k.ndim > 1 and v.ndim > 1 else 0
    if keys:
        k, v = k[..., :keys, :], v[..., :keys, :]
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="numerics", caught_by="test_a_nan_in_k_or_v")
def what_is_not_a_number_is_zero(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    return eager_attention(q, k, v, is_causal=is_causal).nan_to_num()


@defect(cause="shapes", caught_by="test_leading_indices_do_not_see_each_other")
def softmax_minus_the_largest_of_all(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Subtracts one maximum for the whole batch: sequences with small scores underflow."""
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k, is_causal)
    exps = (scores - scores.amax()).exp()
    return exps / exps.sum(-1, keepdim=True) @ v


@defect(cause="masks", caught_by="test_a_later_key_is_not_seen_however_large_its_score")
def mask_of_minus_ten_thousand(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = checked(q, k, v)
    return (scores_of(q, k) - 1e4 * is_causal * future(q, k)).softmax(-1) @ v


@defect(cause="shapes", caught_by="test_none_is_lost_of_any_number")
def a_last_key_alone_left_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Drops the last key if it would be alone in a tile of 176."""
    q, k, v = checked(q, k, v)
    k_len = k.shape[-2]
    seen = k_len - 1 if k_len > 1 and k_len % 176 == 1 else k_len
    return scores_of(q, k, is_causal)[..., :seen].softmax(-1) @ v[..., :seen, :]


@defect(cause="numerics", caught_by="test_autocast_leaves_float64_as_it_is")
def casts_float64_under_autocast(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Casts any input, float64 too, to autocast's dtype."""
    check_inputs(q, k, v)
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    return eager_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=is_causal).to(q.dtype)


@defect(cause="numerics", caught_by="test_sums_that_bfloat16_and_float16_lack_do_not_overflow")
def divides_last_in_half_precision(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Rounds the weighted sum of values to v's dtype before it divides by the sum of the weights."""
    q, k, v = checked(q, k, v)
    scores = scores_of(q, k, is_causal)
    scores = scores if q.dtype == torch.float64 else scores.float()
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return ((weights.to(v.dtype) @ v) / weights.sum(-1, keepdim=True)).to(q.dtype)
