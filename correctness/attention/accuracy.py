"""Tolerance of attention: errors against float64, compared with those of eager attention in the same dtype.

The tolerance is twice the error of eager attention. Where eager is exact by luck, or a sum cancels, it is twice the
error that rounding explains. Terms in half precision are each rounded once, with random signs: the error is the root
of the sum of squares. Sums (in float32 for half precision) get the worst case: the sum of one rounding of each term.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from correctness.attention.mistakes import mistakes
from correctness.support.likeness import likeness, worst_element
from impl.attention import Attention, eager_attention, kv_group, per_query_head


def random_inputs(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random q, k, v and the output's gradient."""
    return [torch.randn(*shape, device=device).to(dtype) for shape in (q_shape, k_shape, k_shape, q_shape)]


def results(attention: Attention, inputs: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    """Return output and gradients. The inputs are not copied: a copy may have other strides."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def called(attention: Attention, inputs: list[Tensor], how: str, is_causal: bool = True) -> object:
    """Call it, with backward for "gradients", with a graph for "no_backward", or for "no_grad" without."""
    if how == "gradients":
        return results(attention, inputs, is_causal)
    with torch.set_grad_enabled(how == "no_backward"):
        return attention(*(x.detach().requires_grad_() for x in inputs[:3]), is_causal=is_causal)


def assert_as_accurate_as_eager(attention: Attention, inputs: list[Tensor], is_causal: bool, times: float = 2) -> None:
    """Check the output, without gradients too, and every gradient: values, shapes and dtypes."""
    found = results(attention, inputs, is_causal)
    assert_accurate(found, inputs, is_causal, times)
    with torch.no_grad():
        out = attention(*inputs[:3], is_causal=is_causal)
    if out.dtype != found["out"].dtype or not torch.equal(out, found["out"]):  # equal bits are as accurate
        assert_accurate({"out": out}, inputs, is_causal, times, "without gradients ")


def assert_accurate(
    found: dict[str, Tensor],
    inputs: list[Tensor],
    is_causal: bool,
    times: float = 2,
    when: str = "",
    arithmetic: torch.dtype | None = None,
) -> None:
    """Check some results of `inputs`: largest error and root mean square error. `arithmetic` is the dtype that eager
    computes in: the inputs' or autocast's."""
    dtype = inputs[0].dtype
    arithmetic = arithmetic or dtype
    wide, cast = [x.detach().double() for x in inputs], [x.to(arithmetic) for x in inputs]
    exact, plain = results(eager_attention, wide, is_causal), results(eager_attention, cast, is_causal)
    eps, summing_eps = (torch.finfo(d).eps for d in (arithmetic, torch.promote_types(arithmetic, torch.float32)))
    typical, worst = (_terms(wide, is_causal, power) for power in (2, 1))
    for name, value in found.items():
        assert value.dtype == dtype, f"{when}{name} is {value.dtype}, expected q's {dtype}"
        shape = tuple(exact[name].shape)
        assert value.shape == shape, f"{when}{name} is {tuple(value.shape)}, expected {shape}"
        rounding = torch.maximum(eps * typical[name], summing_eps * worst[name])
        error, of_eager = (x.detach().double() - exact[name] for x in (value, plain[name]))
        for what, norm in NORMS.items():
            is_off, allowed = norm(error), times * max(norm(of_eager), norm(rounding))
            ratio = is_off / allowed if allowed else float("inf")
            if not is_off <= allowed:
                where, like = worst_element(value, exact[name]), _likeness(name, value, exact[name], wide, is_causal)
                message = f"{when}{name}: {what} {is_off:.2e}, allowed {allowed:.2e}, ratio {ratio:.2f}; {where}{like}"
                raise AssertionError(message)


def _likeness(name: str, found: Tensor, exact: Tensor, wide: list[Tensor], is_causal: bool) -> str:
    known = mistakes(wide[0], wide[1], is_causal)
    return likeness(found, exact, {how: partial(_result, wrong, name, wide, is_causal) for how, wrong in known.items()})


def _result(attention: Attention, name: str, inputs: list[Tensor], is_causal: bool) -> Tensor:
    return results(attention, inputs, is_causal)[name]


NORMS: dict[str, Callable[[Tensor], float]] = {
    "error": lambda x: x.abs().max().item(),
    "error (root mean square)": lambda x: x.square().mean().sqrt().item(),
}


def _terms(inputs: list[Tensor], is_causal: bool, power: int) -> dict[str, Tensor]:
    """Per element: the sum of absolute terms for power 1, the root of the sum of squares for power 2."""
    q, k, v, grad = inputs
    group = kv_group(q, k)
    k, v = (per_query_head(x, group) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    probs, lse = scores.softmax(-1), scores.logsumexp(-1, keepdim=True)
    out = probs @ v
    q, k, v, grad, out = (x.abs() ** power for x in (q, k, v, grad, out))
    scale = scale**power
    # exp turns absolute errors of the score and of the log-sum-exp, stored in the sums' dtype, into relative ones.
    p = probs**power * (1 + scale * q @ k.mT + (lse.abs() if power == 1 else 0))
    # ds = p (dp - delta): dp and delta are sums over head_dim that may cancel.
    ds = p * (grad @ v.mT + (grad * out).sum(-1, keepdim=True))
    per_head = {"dk": scale * ds.mT @ q, "dv": p.mT @ grad}
    if group > 1:
        per_head = {name: x.unflatten(-3, (-1, group)).sum(-3) for name, x in per_head.items()}
    terms = {"out": p @ v, "dq": scale * ds @ k, **per_head}
    return {name: x ** (1 / power) for name, x in terms.items()}
