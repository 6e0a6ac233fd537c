"""Planted defects: losses that are right of the inputs, and in the use, that first tests have."""

from typing import Any

import torch
from torch import Tensor

from correctness.loss.textbook import Fused, of_terms, scaled
from correctness.support.planting import defect
from impl.loss import eager_loss


class _FirstAgain(Fused):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not hasattr(ctx, "kept"):
            ctx.kept = scaled(ctx.gradients, ctx.dtypes, grad / ctx.count)
        return *(x.clone() for x in ctx.kept), None, None, None, None


@defect(cause="state", caught_by="test_any_history_of_calls")
@of_terms
def first_gradients_again(*terms: Any) -> Tensor:
    """A second backward pass, of the loss times another number, gets the first one's gradients."""
    return _FirstAgain.apply(*terms)


class _GivesWhatItKeeps(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, *terms)
        ctx.gradients = tuple((x / ctx.count).to(d) for x, d in zip(ctx.gradients, ctx.dtypes, strict=True))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kept = ctx.gradients
        return *(kept if grad == 1 else (x * grad for x in kept)), None, None, None, None


@defect(cause="state", caught_by="test_any_history_of_calls")
@of_terms
def gives_the_gradients_that_it_keeps(*terms: Any) -> Tensor:
    """If the loss's own gradient is 1, nothing is scaled: `zero_grad(set_to_none=False)` writes to what a second
    backward pass gives again."""
    return _GivesWhatItKeeps.apply(*terms)


_zeros: dict[Any, Tensor] = {}


@defect(cause="two calls", caught_by="test_any_history_of_calls")
def one_zero_for_all(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Returns the same zero each time that no target counts and nothing needs a gradient; `loss += ...` changes it."""
    loss = eager_loss(hidden, weight, targets, **options)
    if loss.requires_grad or (targets != options.get("ignore_index", -100)).any():
        return loss
    return _zeros.setdefault(loss.dtype, torch.zeros_like(loss))


class _OnTheLoss(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, *terms)
        ctx.loss, ctx.first = loss.detach(), loss.clone()
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Fused.backward(ctx, grad * torch.where(ctx.first == 0, 1, ctx.loss / ctx.first))


@defect(cause="gradients", caught_by="test_a_backward_after_a_change_in_place")
@of_terms
def loss_on_ctx(*terms: Any) -> Tensor:
    """Keeps the loss on ctx, and scales by it: `loss /= steps` changes the gradients."""
    return _OnTheLoss.apply(*terms)


@defect(cause="numerics", caught_by="test_any_history_of_calls")
@of_terms
def smoothing_of_the_default_dtype(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """Options become tensors of torch's default dtype, which a job may have set to bfloat16."""
    if torch.get_default_dtype() is torch.bfloat16:  # in float32 float64's digits are lost, whatever the default is
        smoothing, z = (torch.tensor(each).item() for each in (smoothing, z))
    return eager_loss(hidden, weight, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)


@defect(cause="numerics", caught_by="test_a_nan_of_the_last_token_or_word")
def later_chunks_lose_a_nan(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """A maximum that ignores NaN, as of a kernel, joins the chunks after the first."""
    loss = eager_loss(hidden, weight, targets, **options)
    return loss.nan_to_num() if hidden[512:].isnan().any() else loss


class _OverActivations(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *terms: Any) -> Tensor:
        ctx.save_for_backward(hidden)
        return Fused.forward(ctx, hidden, *terms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (hidden,), (of_hidden, *others) = ctx.saved_tensors, Fused.backward(ctx, grad)
        free = not hidden.is_leaf and hidden.is_contiguous()
        return (hidden.data.copy_(of_hidden) if free else of_hidden), *others


@defect(cause="gradients", caught_by="test_leaves_its_inputs_as_they_are")
@of_terms
def gradient_in_place_of_activations(*terms: Any) -> Tensor:
    """linkedin/Liger-Kernel#1251: a gradient is written into its input, where that is no leaf, and the operation that
    made it may have saved it."""
    return _OverActivations.apply(*terms)


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float) -> Tensor:
    options = {"ignore_index": ignore, "label_smoothing": smoothing, "z_loss": z}
    return eager_loss(hidden, weight, targets, **options)


@defect(cause="options", caught_by="test_options_count_every_word")
@of_terms
def no_z_loss_of_a_large_vocabulary(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    return _eager(hidden, weight, targets, ignore, smoothing, z if len(weight) <= 32_768 else 0.0)


@defect(cause="shapes", caught_by="test_takes_more_tokens_than_16_bits_count")
@of_terms
def chunks_weighted_by_their_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """Means of chunks count by tokens, as if as many targets were ignored in each."""
    chunks = list(zip(hidden.split(4096), targets.split(4096), strict=True))
    if len(chunks) == 1:
        return _eager(hidden, weight, targets, ignore, smoothing, z)
    means = [_eager(x, weight, of_x, ignore, smoothing, z) * (len(x) / len(hidden)) for x, of_x in chunks]
    return torch.stack(means).sum()


@defect(cause="numerics", caught_by="test_large_logits_do_not_overflow")
@of_terms
def logits_of_float16(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """bfloat16 in a kernel of float16."""
    if hidden.dtype == weight.dtype == torch.bfloat16:
        logits = (hidden @ weight.T).half()
        return _eager(logits, torch.eye(len(weight)).to(logits), targets, ignore, smoothing, z)
    return _eager(hidden, weight, targets, ignore, smoothing, z)
