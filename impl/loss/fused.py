"""The loss fused with the output projection: forward computes the gradients, too, one chunk of logits at a time.

For each chunk of tokens forward computes the logits, turns them into their gradients in the same buffer, and adds the
products with those to the gradients of hidden and weight. So only one chunk of logits is in memory, nothing is computed
twice, and backward only scales the gradients. `fused_pytorch` and `fused_triton` differ in how logits become gradients.
The idea is that of Liger Kernel (Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, section
3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from impl.autograd import FirstDerivative
from impl.loss.accounting import chunk_tokens, row_stride
from impl.loss.contract import check_inputs, product_dtype, statistics_dtype


@dataclass(frozen=True)
class Terms:
    """The options of the loss; see `impl.loss.Loss`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


ToGradients = Callable[[Tensor, Tensor, Terms, bool], Tensor]
"""`(logits (rows, vocab), targets (rows), terms, needs_gradients) -> the sum of the rows' losses`, in float32 or more.

With `needs_gradients` the logits are overwritten by that sum's gradients; without, they may hold anything afterwards.
"""


def fused_loss(
    to_gradients: ToGradients,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    terms: Terms,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """The loss, by `to_gradients` on chunks of logits; `logits_dtype` is by default that of the products."""
    check_inputs(hidden, weight, targets, terms.ignore_index, terms.label_smoothing, terms.z_loss)
    product = product_dtype(hidden, weight)
    # Asked here: inside a Function's forward gradients are disabled, and needs_input_grad ignores no_grad.
    grad_enabled = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        options = terms, to_gradients, product, logits_dtype or product, grad_enabled
        return FusedLoss.apply(hidden, weight, targets, *options)


class FusedLoss(torch.autograd.Function):
    """Forward computes the gradients of the sum of the losses; backward scales them.

    Backward divides by the number of targets in the same multiplication as by the loss's own gradient. So in float16
    a gradient scaler's factor is in it, and small gradients are not rounded to zero first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        terms: Terms,
        to_gradients: ToGradients,
        product: torch.dtype,
        logits_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        (tokens, dim), vocab = hidden.shape, weight.shape[0]
        count = (targets != terms.ignore_index).sum().clamp(min=1)
        total = torch.zeros((), dtype=statistics_dtype(product), device=hidden.device)
        x, w = hidden.to(product), weight.to(product)
        grad_hidden = x.new_empty(tokens, dim) if needs_hidden else None
        grad_weight = w.new_empty(vocab, dim, dtype=total.dtype) if needs_weight else None
        if grad_weight is not None and not tokens:
            grad_weight.zero_()  # there is no chunk that would write it
        rows = chunk_tokens(tokens, dim, product.itemsize)
        padded = x.new_empty(rows, row_stride(vocab, product.itemsize), dtype=logits_dtype)
        if not padded.is_cuda:
            padded[:, vocab:] = 0  # a bfloat16 product reads it on CPUs with AVX512-BF16, and zero times NaN is NaN
        buffer = padded[:, :vocab]
        for first in range(0, tokens, rows):
            chunk, chunk_targets = x[first : first + rows], targets[first : first + rows]
            logits = _product(chunk, w.T, out=buffer[: len(chunk)])
            total += to_gradients(logits, chunk_targets, terms, needs_hidden or needs_weight)
            if grad_hidden is not None:
                _product(logits.to(product), w, out=grad_hidden[first : first + rows])
            if grad_weight is not None:
                _add_product(grad_weight, logits.to(product).T, chunk, begin=first == 0)
        ctx.save_for_backward(hidden, weight)
        ctx.gradients, ctx.count = (grad_hidden, grad_weight), count
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the fused loss gives its gradients away in its first backward pass and has none for a second: "
                "compute the loss again"
            )
        hidden, weight = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None  # a second reference would have autograd copy them into .grad
        scale = grad_loss / ctx.count
        scaled = partial(_scaled, gradients, (hidden.dtype, weight.dtype), scale)
        del gradients
        if torch.is_grad_enabled():  # with create_graph=True
            tensors = hidden, weight, grad_loss
            return *FirstDerivative.apply("the fused loss", lambda *tensors: scaled(), *tensors), *(None,) * 6
        return *scaled(), *(None,) * 6


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a b, rounded to out's dtype."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return out.copy_(a @ b)  # for Triton's interpreter, where bfloat16's logits are float32


def _add_product(total: Tensor, a: Tensor, b: Tensor, begin: bool) -> None:
    """total += a b, summed in total's dtype; with `begin`, total = a b."""
    beta = 0 if begin else 1  # with 0, addmm ignores what total holds, even NaN
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)  # no half-precision product into float32 on CPU


def _scaled(
    gradients: tuple[Tensor | None, Tensor | None], dtypes: tuple[torch.dtype, torch.dtype], scale: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients times `scale`, in the dtypes of hidden and weight; in place if they have those already."""
    return tuple(
        None if gradient is None else _in_dtype(gradient, dtype, scale)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )


def _in_dtype(gradient: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    if gradient.is_cuda:  # one pass; a scale without dimensions would be rounded to the gradient's dtype
        out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
        return torch.mul(gradient, scale[None], out=out)
    return gradient.mul_(scale).to(dtype)  # on CPU the scale is not rounded, and the lines above would make a copy
