"""Right losses that work in unusual ways: the tests must accept them."""

import random
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from correctness.loss.textbook import ByAutograd, of_terms
from correctness.support.planting import right
from impl.loss import eager_loss, product_dtype


def _checked(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> None:
    """Raise the contract's errors in other words, over several lines."""
    problems = []
    if hidden.ndim != 2 or weight.ndim != 2 or targets.ndim != 1:
        raise ValueError(f"wrong ranks:\n{hidden.ndim}, {weight.ndim}, {targets.ndim}")
    if hidden.shape[1] != weight.shape[1] or len(hidden) != len(targets) or not weight.numel():
        problems.append("shapes do not fit")
    if len({x.device for x in (hidden, weight, targets)}) > 1:
        raise ValueError("everything on one device, please")
    autocast = torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in (hidden.dtype, weight.dtype)
    if (hidden.dtype != weight.dtype and not autocast) or not hidden.is_floating_point():
        problems.append("dtypes do not fit")
    if targets.dtype not in (torch.int64, torch.int32):
        problems.append("targets are integers")
    if label_smoothing < 0 or label_smoothing > 1 or z_loss < 0:
        problems.append("bad options")
    if not problems and ((targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))).any():
        problems.append("unknown word")
    if problems:
        raise ValueError("\n".join(problems))


@right("torch's cross_entropy behind a check of its own wording, which takes int32 targets as well")
def torchs_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    _checked(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
    targets = targets.long()
    kept = targets != ignore_index
    logits = linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not kept.any():
        return logits.sum() * 0
    loss = cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return loss + z_loss * logits[kept].logsumexp(-1).square().mean()


@right("float64 inside, and only the tokens that count; refuses options it does not have as Unsupported")
@of_terms
def float64_of_those_that_count(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    if z:
        from shardmark.api.registry import Unsupported

        raise Unsupported("no z_loss here")
    kept = (targets != ignore).nonzero()[:, 0]
    product = product_dtype(hidden, weight)
    logits = (hidden.to(product)[kept] @ weight.to(product).mT).double()
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    wanted = log_probs.gather(1, targets[kept][:, None]).sum()
    total = (1 - smoothing) * wanted
    if smoothing:  # or 0 times a logit of minus infinity is NaN
        total = total + smoothing * log_probs.mean(-1).sum()
    return (-total / max(1, len(kept))).to(torch.promote_types(product, torch.float32))


class _Recomputing(torch.autograd.Function):
    """Saves two numbers per token, its largest logit and the log-sum-exp of what others are below it, and recomputes
    the logits in backward, block by block of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        kept = targets != ignore
        blocks = _blocks(weight)
        parts = [_logits(hidden, weight[block]) for block in blocks]
        largest = torch.stack([part.amax(-1) for part in parts]).amax(0)
        below = torch.stack([(part - largest[:, None]).logsumexp(-1) for part in parts]).logsumexp(0)
        at = torch.zeros_like(below)
        total = torch.zeros_like(below)
        for block, part in zip(blocks, parts, strict=True):
            part = part - largest[:, None]
            inside = (targets >= block.start) & (targets < block.stop) & kept
            column = (targets - block.start).masked_fill(~inside, 0)
            at += part.gather(1, column[:, None])[:, 0].masked_fill(~inside, 0)
            total += part.sum(-1)
        lse = largest + below
        losses = below - (1 - smoothing) * at + z * lse.square()
        if smoothing:  # or 0 times a logit of minus infinity is NaN
            losses -= smoothing * total / weight.shape[0]
        ctx.save_for_backward(hidden, weight, targets, largest, below)
        ctx.terms = ignore, smoothing, z
        return losses.masked_fill(~kept, 0).sum() / kept.sum().clamp(min=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, largest, below = ctx.saved_tensors
        ignore, smoothing, z = ctx.terms
        lse = largest + below
        kept = targets != ignore
        scale = grad / kept.sum().clamp(min=1) * kept
        grad_hidden, grad_weight = torch.zeros(hidden.shape, dtype=lse.dtype), []
        grad_hidden = grad_hidden.to(hidden.device)
        for block in _blocks(weight):
            rows = weight[block]
            gradient = (1 + 2 * z * lse)[:, None] * (_logits(hidden, rows) - largest[:, None] - below[:, None]).exp()
            gradient -= smoothing / weight.shape[0]
            inside = ((targets >= block.start) & (targets < block.stop) & kept).nonzero()[:, 0]
            gradient[inside, targets[inside] - block.start] -= 1 - smoothing
            gradient = gradient * scale[:, None]
            grad_hidden += gradient @ rows.to(lse.dtype)
            grad_weight.append(gradient.mT @ hidden.to(lse.dtype))
        return grad_hidden.to(hidden.dtype), torch.cat(grad_weight).to(weight.dtype), None, None, None, None


def _blocks(weight: Tensor) -> list[slice]:
    return [slice(start, min(start + 3000, len(weight))) for start in range(0, len(weight), 3000)]


def _logits(hidden: Tensor, rows: Tensor) -> Tensor:
    product = product_dtype(hidden, rows)
    logits = hidden.to(product) @ rows.to(product).mT
    return logits.to(torch.promote_types(product, torch.float32))


@right("logits computed again in backward, by block of the vocabulary, with @once_differentiable")
@of_terms
def recomputing(hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float) -> Tensor:
    product = product_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = hidden.to(product), weight.to(product)
        return _Recomputing.apply(*wide, targets, ignore, smoothing, z)


@right("sums its full chunks of tokens in a random order, so that two calls differ in the last bits")
@of_terms
def chunks_in_random_order(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    *full, last = zip(hidden.split(100), targets.split(100), strict=True)
    random.shuffle(full)
    total = 0 * (hidden.double().sum() + weight.double().sum())
    total = total.to(torch.promote_types(product_dtype(hidden, weight), torch.float32))
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))  # makes its gradients add up in float32
    for rows, wanted in (*full, last):
        logits = linear(rows, wide.to(weight.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        options = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": "sum"}
        total = total + cross_entropy(logits, wanted, **options)
        if z:
            total = total + z * logits.logsumexp(-1).square().masked_fill(wanted == ignore, 0).sum()
    return total / (targets != ignore).sum().clamp(min=1)


@right("tokens to be ignored are left out before the product, and the loss is float64")
@of_terms
def leaves_ignored_out(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    kept = (targets != ignore).nonzero()[:, 0]
    logits = linear(hidden[kept], weight).double()
    # No target is left to ignore, and ignore_index may be a word.
    loss = cross_entropy(logits, targets[kept], ignore_index=-1, label_smoothing=smoothing, reduction="sum")
    if z:
        loss = loss + z * logits.logsumexp(-1).square().sum()
    return loss / max(1, len(kept))


@right("computes its gradients in forward, with autograd and in float64, where there is autograd")
def gradients_in_forward(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return (eager_loss if torch.is_inference_mode_enabled() else _by_autograd)(hidden, weight, targets, **options)


class _Freed(ByAutograd):
    """Gives its gradients away once, and a second backward pass is an error."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("its gradients have been given away: a second backward pass needs another forward pass")
        found = ByAutograd.backward(ctx, grad)
        ctx.gradients = None
        return found


_by_autograd = of_terms(_Freed.apply)
