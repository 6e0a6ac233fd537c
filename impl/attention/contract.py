"""The contract of attention, the check that a target meets it, and the family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.attention.accounting import flash_pytorch_peak
from shardmark.api import Family, Race, Refusable, RegistryError, Unsupported, add_family, check_signature, dtype_name

COLUMNS = "tensors whose columns are not contiguous"
FEWER_HEADS = "fewer heads in k and v than in q"


@dataclass(frozen=True)
class Facts:
    """Facts about an attention that questions need, stated where it is registered; a user's own gets the defaults."""

    longest: int | None = None
    """Tokens of the longest sequence that is timed; None for any length."""


class Attention(Protocol):
    """`attention(q, k, v, *, is_causal=False) -> out`, differentiable in q, k and v.

    q: (..., q_len, head_dim), k and v: (..., k_len, head_dim), any number of leading dims, the same in all three, any
    strides, each its own, one dtype: float64, float32, bfloat16 or float16. Grouped-query attention (Ainslie et al.,
    "GQA", 2023): the last leading dim, the heads, may be smaller in k and v by an integer factor `group`; query head h
    then attends to head h // group. out is softmax(q kᵀ / sqrt(head_dim)) v, with q's shape and dtype. Causal means
    that query i attends to keys 0 to i (aligned top-left, as SDPA's `is_causal`).

    Must:

    - out and the gradients are as accurate as eager's in that dtype: at most twice the error, against float64. Under
      autocast out may have autocast's dtype; gradients have their inputs'.
    - Calls are independent: no input changes, nothing that a call returned changes later, and other calls may come
      before one and between its forward and its backward. The output is the same under `torch.no_grad()` and
      `torch.inference_mode()`, and torch's default dtype changes nothing.
      Backward may run in another thread.
    - An output's gradient that is not finite, or too large, makes gradients that are not finite.
    - In a backward pass the caller's hooks on inputs run once, of whole gradients.
    - A second derivative, of one input alone too, a second backward pass, or one after an input or the output has
      changed in place, is right or raises an error.
    - Calls leave nothing behind. A `torch.autograd.Function` whose `apply` takes (q, k, v, is_causal) meets the
      contract too, as a FlashAttention: between forward and backward it holds nothing of q_len times k_len elements.
    - What it does not take it refuses by `shardmark.api.Unsupported`, a ValueError: whole dtypes, head dims other than
      16, 32, 64 and 128, fewer heads in k and v than in q, tensors whose columns are not contiguous, devices.

    Should: ValueError for shapes, dtypes and devices that do not go together and for no keys; an empty output without
    queries; a NaN in k or v reaches every output that attends to its key, and what is not finite reaches no more than
    in eager; equal calls give equal bits; a backward after a forward under autocast has the forward's weights.

    Not asked: calls from several threads at once.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor: ...


MAY_REFUSE = (
    Refusable("dtypes", lambda q, k, v, **_: dtype_name(q.dtype), elsewhere=True),
    Refusable(
        "head dims other than 16, 32, 64, 128",
        lambda q, k, v, **_: str(q.shape[-1]) if q.shape[-1] not in (16, 32, 64, 128) else None,
        elsewhere=True,
    ),
    Refusable(COLUMNS, lambda q, k, v, **_: COLUMNS if any(x.stride(-1) != 1 for x in (q, k, v)) else None),
    Refusable(FEWER_HEADS, lambda q, k, v, **_: FEWER_HEADS if kv_group(q, k) > 1 else None),
    Refusable("devices", lambda q, k, v, **_: q.device.type, elsewhere=True),
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, in one line, unless q, k and v go together as the contract says."""
    if not _shapes_go_together(q.shape, k.shape, v.shape):
        raise ValueError(
            "attention takes q (..., q_len, head_dim) and k, v (..., k_len, head_dim) with the same leading dims "
            "(the last of them, heads, may be fewer in k and v by an integer factor), "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[-1] == 0 or (k.shape[-2] == 0 and q.numel() > 0):
        raise ValueError(f"attention over nothing: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        raise ValueError(
            "attention takes q, k, v of one floating dtype (float64, float32, bfloat16, float16), "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"attention takes q, k, v on one device, got {q.device}, {k.device}, {v.device}")


def _shapes_go_together(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    if len(q) < 2 or len(q) != len(k) or k != v or q[-1] != k[-1]:
        return False
    return q[:-2] == k[:-2] or (q[:-3] == k[:-3] and k[-3] > 0 and q[-3] % k[-3] == 0)


def kv_group(q: Tensor, k: Tensor) -> int:
    """Query heads for each head of k and v: 1 unless it is grouped-query attention."""
    return 1 if q.shape[:-2] == k.shape[:-2] else q.shape[-3] // k.shape[-3]


def per_query_head(x: Tensor, group: int) -> Tensor:
    """k or v with each head repeated for the query heads of its group."""
    return x if group == 1 else x.repeat_interleave(group, dim=-3)


def as_attention(target: Any) -> Attention:
    """A function with the contract's signature; `target` is one already, or a `torch.autograd.Function`."""
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return partial(_apply, target)
    return target


def _apply(
    function: type[torch.autograd.Function], q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False
) -> Tensor:
    return function.apply(q, k, v, is_causal)


SIGNATURE = "(q, k, v, *, is_causal=False)"


def _check(target: Any, device: str) -> None:
    """Call the target on a tiny input, and run backward: shapes, dtypes and differentiability must be right."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; attention is attention{SIGNATURE}")
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        check_signature(target.forward, "forward(ctx, q, k, v, is_causal)", None, None, None, None, False)
    else:
        check_signature(target, SIGNATURE, None, None, None, is_causal=False)
    try:
        q, k, v, out = _tiny_call(target, device, torch.float32)
    except Unsupported:  # a fused kernel may take half precision only
        q, k, v, out = _tiny_call(target, device, torch.bfloat16)
    if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
        found = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else repr(out)
        raise RegistryError(f"for q {tuple(q.shape)} of {q.dtype} it returned {found}, and not q's shape and dtype")
    out.sum().backward()
    if any(x.grad is None for x in (q, k, v)):
        raise RegistryError("its output is not differentiable in q, k and v")


def _tiny_call(target: Any, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Any]:
    q, k, v = (torch.randn(2, 4, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v, as_attention(target)(q, k, v, is_causal=True)


FAMILY = add_family(
    Family(
        "attention",
        Attention,
        reference="eager",
        check=_check,
        adapt=as_attention,
        may_refuse=MAY_REFUSE,
        memory=flash_pytorch_peak,  # for a user's own attention: no quadratic memory
        time=Race("eager"),
        facts=Facts(),
    )
)
