"""A textbook fused loss, step by step; each planted defect changes one step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from impl.loss import check_inputs, eager_loss, product_dtype


class Fused(torch.autograd.Function):
    """Correct: forward computes the gradients of the sum of the losses, and backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        losses, gradient, kept = loss_and_gradients(hidden, weight, targets, ignore, smoothing, z)
        ctx.count = kept.sum().clamp(min=1)
        ctx.gradients = gradient @ weight.to(gradient.dtype), gradient.T @ hidden.to(gradient.dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum() / ctx.count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *scaled(ctx.gradients, ctx.dtypes, grad / ctx.count), None, None, None, None


class ByAutograd(Fused):
    """Computes the gradients of the mean in forward with autograd, which `torch.inference_mode` disables."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        ctx.dtypes, ctx.count, product = (hidden.dtype, weight.dtype), 1, product_dtype(hidden, weight)
        with torch.enable_grad():
            leaves = [x.detach().to(product).double().requires_grad_() for x in (hidden, weight)]
            loss = eager_loss(*leaves, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)
            ctx.gradients = torch.autograd.grad(loss, leaves)
        return loss.detach()


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, the gradients of the logits, and a mask of the tokens that count."""
    return of_logits(linear(hidden, weight), targets, ignore, smoothing, z)


def of_logits(
    logits: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `loss_and_gradients` from the logits (tokens, vocab)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept = targets != ignore
    at = targets.masked_fill(~kept, 0)
    lse = logits.logsumexp(-1, keepdim=True)
    wanted = (1 - smoothing) * one_hot(at, logits.shape[1]) + smoothing / logits.shape[1]
    logs = logits.log_softmax(-1)  # of large logits not their difference from lse, which has lost its digits
    losses = z * lse[:, 0].square() - (wanted * logs).sum(-1)
    gradient = (1 + 2 * z * lse) * logs.exp() - wanted
    return losses.masked_fill(~kept, 0), gradient.masked_fill(~kept[:, None], 0), kept


def scaled(gradients: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...], scale: Tensor) -> tuple[Tensor, ...]:
    return tuple((x * scale).to(dtype) for x, dtype in zip(gradients, dtypes, strict=True))


def of_terms(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss that checks its inputs and calls `function(hidden, weight, targets, ignore_index, label_smoothing,
    z_loss)`."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        check_inputs(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
        return function(hidden, weight, targets, ignore_index, label_smoothing, z_loss)

    loss.__name__, loss.__module__ = function.__name__, function.__module__
    return loss
