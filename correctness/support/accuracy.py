"""How accurate attention has to be: as eager attention in the same dtype, against float64.

The tolerance is twice the error of eager attention. Where eager is exact by luck, or a sum cancels, it is twice the
error that rounding explains. In half precision that is one rounding of each term of a result, added up like random
signs: the root of the sum of squares. In the dtype that sums are made in (float32 for half precision) it is the worst
case: the sum of one rounding of each term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.attention import Attention, eager_attention, kv_group, per_query_head


def random_inputs(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random q, k, v and the output's gradient."""
    return [torch.randn(*shape, device=device).to(dtype) for shape in (q_shape, k_shape, k_shape, q_shape)]


def results(attention: Attention, inputs: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    """Output and gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def assert_as_accurate_as_eager(attention: Attention, inputs: list[Tensor], is_causal: bool) -> None:
    """Check the output and every gradient, and their shapes and dtypes."""
    dtype = inputs[0].dtype
    exact = results(eager_attention, [x.double() for x in inputs], is_causal)
    plain = results(eager_attention, inputs, is_causal)
    wide = [x.double() for x in inputs]
    typical, worst = _terms(wide, is_causal, power=2), _terms(wide, is_causal, power=1)
    for name, found in results(attention, inputs, is_causal).items():
        assert found.dtype == dtype and found.shape == exact[name].shape
        error, plain_error = ((x.double() - exact[name]).abs().max().item() for x in (found, plain[name]))
        summing = torch.promote_types(dtype, torch.float32)
        rounding = max(torch.finfo(dtype).eps * typical[name], torch.finfo(summing).eps * worst[name])
        allowed = 2 * max(plain_error, rounding)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, ratio {error / allowed:.2f}"


def _terms(inputs: list[Tensor], is_causal: bool, power: int) -> dict[str, float]:
    """The largest sum of terms in each result: of their absolute values, or the root of that of their squares."""
    q, k, v, grad = inputs
    group = kv_group(q, k)
    k, v = (per_query_head(x, group) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    probs = scores.softmax(-1)
    out = probs @ v
    q, k, v, grad, out = (x.abs() ** power for x in (q, k, v, grad, out))
    scale = scale**power
    p = probs**power * (1 + scale * q @ k.mT)  # exp turns a score's absolute error into a relative one
    # Of ds = p (dp - delta): dp and delta are sums over head_dim, and may cancel.
    ds = p * (grad @ v.mT + (grad * out).sum(-1, keepdim=True))
    per_head = {"dk": scale * ds.mT @ q, "dv": p.mT @ grad}
    if group > 1:
        per_head = {name: x.unflatten(-3, (-1, group)).sum(-3) for name, x in per_head.items()}
    terms = {"out": p @ v, "dq": scale * ds @ k, **per_head}
    return {name: x.max().item() ** (1 / power) for name, x in terms.items()}
