"""The loss fused with the output projection, for whatever turns a chunk of logits into their gradients in place.

For each chunk of tokens forward computes the logits, makes their gradients of them in the same buffer, and adds what
those give to the gradients of hidden and weight. So there is one chunk of logits at a time, nothing is computed twice,
and backward only scales. The idea is that of Liger Kernel (Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM
Training", 2024, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from impl.attention.first_derivative import FirstDerivative
from impl.loss.chunks import chunk_tokens, row_stride
from impl.loss.contract import check_inputs, product_dtype, statistics_dtype


@dataclass(frozen=True)
class Terms:
    """What is asked of the loss; see `impl.loss.Loss`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


ToGradients = Callable[[Tensor, Tensor, Terms, bool], Tensor]
"""`(logits (rows, vocab), targets (rows), terms, wanted) -> the sum of the rows' losses`, in float32 or more.

Where `wanted`, the logits are overwritten by that sum's gradients; else they may hold anything.
"""


def fused_loss(
    to_gradients: ToGradients,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    terms: Terms,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """The loss, by `to_gradients` on chunks of logits, in `logits_dtype` where it is not the products'."""
    check_inputs(hidden, weight, targets, terms.ignore_index, terms.label_smoothing, terms.z_loss)
    product = product_dtype(hidden, weight)
    # In a Function's forward gradients are off, and its needs_input_grad does not know of no_grad.
    wanted = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        return FusedLoss.apply(hidden, weight, targets, terms, to_gradients, product, logits_dtype or product, wanted)


class FusedLoss(torch.autograd.Function):
    """What `fused_loss` calls.

    The gradients that forward leaves are of the sum: dividing by the number of targets is backward's, together with
    the loss's own gradient. So in float16 a gradient scaler lifts them before they are rounded to nothing.
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
        wanted: bool,
    ) -> Tensor:
        """Loss and gradients, chunk by chunk."""
        needs_hidden, needs_weight = (wanted and needed for needed in ctx.needs_input_grad[:2])
        (tokens, dim), vocab = hidden.shape, weight.shape[0]
        kept = (targets != terms.ignore_index).sum().clamp(min=1)
        total = torch.zeros((), dtype=statistics_dtype(product), device=hidden.device)
        x, w = hidden.to(product), weight.to(product)
        grad_hidden = x.new_empty(tokens, dim) if needs_hidden else None
        grad_weight = w.new_empty(vocab, dim, dtype=total.dtype) if needs_weight else None
        if grad_weight is not None and not tokens:
            grad_weight.zero_()  # no chunk will write it
        rows = chunk_tokens(tokens, dim, product.itemsize)
        buffer = x.new_empty(rows, row_stride(vocab, product.itemsize), dtype=logits_dtype)[:, :vocab]
        for first in range(0, tokens, rows):
            part, its_targets = x[first : first + rows], targets[first : first + rows]
            logits = _product(part, w.T, out=buffer[: len(part)])
            total += to_gradients(logits, its_targets, terms, needs_hidden or needs_weight)
            if grad_hidden is not None:
                _product(logits.to(product), w, out=grad_hidden[first : first + rows])
            if grad_weight is not None:
                _add_product(grad_weight, logits.to(product).T, part, begin=first == 0)
        ctx.save_for_backward(hidden, weight)
        ctx.gradients, ctx.kept = (grad_hidden, grad_weight), kept
        return total / kept

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of forward, times the loss's own."""
        if ctx.gradients is None:
            raise RuntimeError(
                "the fused loss gives its gradients away in its first backward pass and has none for a second: "
                "compute the loss again"
            )
        hidden, weight = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None  # else they would be copied when they become .grad
        scale = grad_loss / ctx.kept
        scaled = partial(_scaled, gradients, (hidden.dtype, weight.dtype), scale)
        del gradients
        if torch.is_grad_enabled():  # with create_graph=True
            return *_NoSecondDerivative.apply(lambda *tensors: scaled(), hidden, weight, grad_loss), *(None,) * 6
        return *scaled(), *(None,) * 6


class _NoSecondDerivative(FirstDerivative):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Not there."""
        raise RuntimeError("the fused loss has no double backward: its gradients cannot be differentiated; eager's can")


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a b, in `out`, rounded to its dtype."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return out.copy_(a @ b)  # Triton's interpreter wants bfloat16's logits in float32


def _add_product(total: Tensor, a: Tensor, b: Tensor, begin: bool) -> None:
    """total += a b, summed in total's dtype; total = a b to begin with."""
    beta = 0 if begin else 1  # 0: what total holds does not count, be it NaN
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)  # CPU has no product of half precision in float32


def _scaled(
    gradients: tuple[Tensor | None, Tensor | None], dtypes: tuple[torch.dtype, torch.dtype], scale: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients times `scale`, in the dtypes of what they are of; in place where that is theirs already."""
    return tuple(
        None if gradient is None else _in_dtype(gradient, dtype, scale)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )


def _in_dtype(gradient: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    if gradient.is_cuda:  # in one pass, and of one dimension: one without any would be rounded to the gradient's dtype
        out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
        return torch.mul(gradient, scale[None], out=out)
    return gradient.mul_(scale).to(dtype)  # on CPU it is not rounded, and either of the above would take a copy
