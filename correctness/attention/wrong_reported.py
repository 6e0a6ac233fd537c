"""Planted defects: attention that is wrong as public trackers report, or in what it saves."""

import math
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from correctness.attention.textbook import Flash, checked, flash_backward, flash_forward, future, scores_of
from correctness.support.planting import defect
from impl.attention import check_inputs, eager_attention, kv_group


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
class LogSumExpInBfloat16(Flash):
    """Saves the log-sum-exp in the inputs' half precision."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse.to(q.dtype) if q.itemsize == 2 else lse)
        ctx.is_causal = is_causal
        return out


@defect(cause="memory", caught_by="test_what_a_call_saves_is_freed_without_the_collector")
class SavedInACycle(Flash):
    """Its node refers to itself: what it saved stays until the garbage collector runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal)
        ctx.kept, ctx.is_causal, ctx.self = (q, k, v, out, lse), is_causal, ctx
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.kept, grad, ctx.is_causal), None


@defect(cause="memory", caught_by="test_what_a_call_saves_is_freed_without_the_collector")
class OutputOnTheContext(Flash):
    """pytorch/pytorch#25340: the output is an attribute of its own node, and neither is freed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = ctx.out = Flash.forward(ctx, q, k, v, is_causal)
        return out


@defect(cause="gradients", caught_by="test_takes_non_contiguous_inputs")
class OutputsGradientByTheOutputsStrides(Flash):
    """Dao-AILab/flash-attention#355: the output has q's strides, and backward reads the output's gradient by them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = torch.empty_like(q).copy_(Flash.forward(ctx, q, k, v, is_causal))
        ctx.strides = out.stride()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return Flash.backward(ctx, grad.as_strided(grad.shape, ctx.strides))


@defect(cause="masks", caught_by="test_any_history_of_calls")
def aligned_at_the_last_key_without_gradients(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Dao-AILab/flash-attention#282: where keys outnumber queries the mask may be aligned at the first or the last key;
    training and evaluation differ in it."""
    q, k, v = checked(q, k, v)
    past = 0 if torch.is_grad_enabled() else max(0, k.shape[-2] - q.shape[-2])
    return scores_of(q, k).masked_fill(is_causal * future(q, k, 1 + past), -math.inf).softmax(-1) @ v


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def scale_of_the_padded_head_dim(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """bytedance-iaas/sglang#485: pads head_dim to one that the kernel takes, and scales by the padded one."""
    check_inputs(q, k, v)
    head_dim = q.shape[-1]
    size = next((size for size in (16, 32, 64, 128, 256) if size >= head_dim), head_dim)
    q, k, v = (pad(x, (0, size - head_dim)) for x in (q, k, v))
    return eager_attention(q, k, v, is_causal=is_causal)[..., :head_dim]


@defect(cause="shapes", caught_by="test_a_query_sees_the_keys_up_to_its_own")
def zeros_as_keys_up_to_a_whole_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """jax-ml/jax#27224: the zeros that fill the last of several blocks of 64 keys take part in the softmax."""
    check_inputs(q, k, v)
    k_len = k.shape[-2]
    k, v = (pad(x, (0, 0, 0, -k_len % 64 if k_len > 64 else 0)) for x in (k, v))
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="numerics", caught_by="test_what_is_added_to_every_score")
class BackwardSeesPadding(Flash):
    """Dao-AILab/flash-attention#334: backward does not hide the keys that fill the last tile. Their weights, exp(-lse),
    overflow where all scores are far below zero, and infinity times their zeros is no number.
    """

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        keys = k.shape[-2]
        k, v = (pad(x, (0, 0, 0, -keys % 32)) for x in (k, v))
        of_q, of_k, of_v = flash_backward(q, k, v, out, lse, grad, ctx.is_causal)
        return of_q, of_k[..., :keys, :], of_v[..., :keys, :], None


@defect(cause="numerics", caught_by="test_sums_whose_halves_cancel")
class AddsTilesInHalf(Flash):
    """zhuzilin/ring-flash-attention#22: the gradient of q is added up in the inputs' half precision, tile by tile."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        _, *of_keys = flash_backward(q, k, v, out, lse, grad, ctx.is_causal)
        of_q, (_, keys, values) = torch.zeros_like(q), checked(q, k, v)
        wide = torch.promote_types(q.dtype, torch.float32)
        x, keys, values, rise = (t.to(wide) for t in (q, keys, values, grad))
        probs = (scores_of(x, keys, ctx.is_causal) - lse[..., None]).exp()
        of_scores = probs * (rise @ values.mT - (rise * out.to(wide)).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        for first in range(0, keys.shape[-2], 64):
            of_q += (of_scores[..., first : first + 64] @ keys[..., first : first + 64, :]).to(q.dtype)
        return of_q, *of_keys, None


@defect(cause="shapes", caught_by="test_takes_one_query_of_non_contiguous_grouped_heads")
def heads_of_a_group_as_rows(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """pytorch/pytorch#186434: reads the heads of a group as the queries of one, by the stride of q's rows."""
    check_inputs(q, k, v)
    group = kv_group(q, k)
    if q.shape[-2] > 1 or group == 1 or is_causal:
        return eager_attention(q, k, v, is_causal=is_causal)
    rows = q.unflatten(-3, (-1, group))[..., 0, :]  # (..., kv_heads, group, head_dim)
    rows = rows.as_strided(rows.shape, (*rows.stride()[:-2], q.stride(-2), q.stride(-1)))
    return eager_attention(rows, k, v).reshape(q.shape)


@defect(cause="masks", caught_by="test_is_as_accurate_as_eager")
def keys_counted_in_their_split(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """tile-ai/TileOPs#13: without gradients splits the keys of few queries, and masks by the key's number in its
    split."""
    if torch.is_grad_enabled() or q.shape[-2] > 16 or not is_causal:
        return eager_attention(q, k, v, is_causal=is_causal)
    q, k, v = checked(q, k, v)
    parts = [scores_of(q, part, is_causal) for part in k.split(256, dim=-2)]
    return torch.cat(parts, dim=-1).softmax(-1) @ v


@defect(cause="numerics", caught_by="test_what_is_added_to_every_score_changes_nothing")
class HalfATileOfZeros(Flash):
    """pytorch/pytorch#196678: where keys fill half of the last tile of 128, backward takes the other half for keys of
    zeros; where all scores are far below zero, their weights overflow."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        length = k.shape[-2]
        added = 0 if ctx.is_causal or length % 128 != 64 else 64
        padded = [pad(x, (0, 0, 0, added)) for x in (k, v)]
        grad_q, *others = flash_backward(q, *padded, out, lse, grad, ctx.is_causal)
        return grad_q, *(x[..., :length, :] for x in others), None


class _Spread(torch.autograd.Function):
    """Keys or values (..., heads, rows, columns) for each query head, whose gradients are added head after head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        return x.repeat_interleave(group, -3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum(grad.unflatten(-3, (-1, ctx.group)).unbind(-3)), None


@defect(cause="numerics", caught_by="test_adds_up_the_gradients_of_a_large_group")
def heads_of_a_group_added_in_half(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """xlite-dev/ffpa-attn#301: gradients of a group's query heads are added up in half precision."""
    check_inputs(q, k, v)
    if (group := kv_group(q, k)) > 1:
        k, v = (_Spread.apply(x, group) for x in (k, v))
    return eager_attention(q, k, v, is_causal=is_causal)


@defect(cause="numerics", caught_by="test_any_history_of_calls")
class ValuesOfFloat16(Flash):
    """As thu-ml/SageAttention has v: bfloat16 is cast to float16, which lacks its large and its small numbers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return Flash.forward(ctx, q, k, v.half().to(v.dtype) if v.dtype == torch.bfloat16 else v, is_causal)


_OF_THREAD = threading.local()


@defect(cause="state", caught_by="test_any_history_of_calls")
class ArgumentsOfTheThread(Flash):
    """Keeps what is no tensor by thread: on CUDA autograd runs backward in another one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = Flash.forward(ctx, q, k, v, is_causal)
        kept = _OF_THREAD.__dict__.setdefault("kept", {})
        ctx.key = len(kept)
        kept[ctx.key] = is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *flash_backward(*ctx.saved_tensors, grad, _OF_THREAD.kept[ctx.key]), None
