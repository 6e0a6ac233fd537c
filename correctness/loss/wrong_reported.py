"""Planted defects: losses that are wrong as public trackers report, for large vocabularies, or by half precision."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from correctness.loss.textbook import Fused, loss_and_gradients, of_logits, of_terms, scaled
from correctness.support.planting import defect
from impl.loss import eager_loss, product_dtype
from impl.loss.eager import summed_loss


@defect(cause="shapes", caught_by="test_options_count_every_word")
@of_terms
def smooths_over_32768_words(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """A kernel's largest block has 32,768 words; label smoothing divides by that number where there are more."""
    share = smoothing * weight.shape[0] / min(weight.shape[0], 32_768)
    return Fused.apply(hidden, weight, targets, ignore, share, z)


class _LogSumExpInBfloat16(Fused):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, targets, ignore, smoothing, z)
        logits = linear(hidden, weight)
        lse = logits.float().logsumexp(-1, keepdim=True).bfloat16().to(torch.promote_types(logits.dtype, torch.float32))
        _, gradient, kept = loss_and_gradients(hidden, weight, targets, ignore, smoothing, z)
        wide = logits.to(lse.dtype)
        off = ((wide - lse).exp() - wide.softmax(-1)) * (1 + 2 * z * lse)
        gradient = gradient + off.masked_fill(~kept[:, None], 0)
        ctx.gradients = gradient @ weight.to(gradient.dtype), gradient.T @ hidden.to(gradient.dtype)
        return loss


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
@of_terms
def log_sum_exp_in_bfloat16(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """Saves the log-sum-exp in bfloat16 and recomputes the probabilities from it."""
    return _LogSumExpInBfloat16.apply(hidden, weight, targets, ignore, smoothing, z)


class _WeightSummedInItsDtype(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, *terms)
        _, gradient, _ = loss_and_gradients(hidden, weight, *terms)
        total = torch.zeros_like(weight)
        for of_chunk, tokens in zip(gradient.split(16), hidden.split(16), strict=True):
            total += of_chunk.to(weight.dtype).T @ tokens.to(weight.dtype)
        ctx.gradients = ctx.gradients[0], total
        return loss


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
@of_terms
def weights_gradient_summed_in_half_precision(*terms: Any) -> Tensor:
    """linkedin/Liger-Kernel#830: chunks of tokens add to the weight's gradient in bfloat16, which rounds each sum."""
    return _WeightSummedInItsDtype.apply(*terms)


@defect(cause="shapes", caught_by="test_any_history")
def means_of_chunks_by_their_tokens(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """NVIDIA-NeMo/Automodel#3803: averages the chunks' means by their numbers of tokens, ignored ones too."""
    if len(targets) <= 256:
        return eager_loss(hidden, weight, targets, **options)
    chunks = zip(hidden.split(256), targets.split(256), strict=True)
    means = [eager_loss(x, weight, t, **options) * len(t) for x, t in chunks]
    return torch.stack(means).sum() / len(targets)


class _LogitsOverwritten(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        ctx.hidden, ctx.weight, ctx.terms, ctx.logits = hidden, weight, terms, linear(hidden, weight)
        return Fused.forward(ctx, hidden, weight, *terms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, gradient, _ = of_logits(ctx.logits, *ctx.terms)
        ctx.logits.copy_(gradient)
        gradients = gradient @ ctx.weight.to(gradient.dtype), gradient.T @ ctx.hidden.to(gradient.dtype)
        return *scaled(gradients, ctx.dtypes, grad / ctx.count), None, None, None, None


@defect(cause="state", caught_by="test_any_history")
@of_terms
def logits_overwritten_by_their_gradient(*terms: Any) -> Tensor:
    """modelscope/ms-swift#10130: backward writes over the saved logits, which a second backward pass reads again."""
    return _LogitsOverwritten.apply(*terms)


@defect(cause="options", caught_by="test_any_history")
@of_terms
def label_smoothing_of_ignored_tokens_too(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """tinygrad/tinygrad#3570: the smoothing term is a sum over all tokens, those of ignored targets too."""
    loss = eager_loss(hidden, weight, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)
    ignored = targets == ignore
    smooth = -linear(hidden, weight).to(loss.dtype).log_softmax(-1).mean(-1)
    return loss + smoothing * (smooth * ignored).sum() / (~ignored).sum().clamp(min=1)


class _OfLogSumExp(Fused):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        loss = Fused.forward(ctx, hidden, weight, targets, ignore, smoothing, z)
        logits, kept = linear(hidden, weight), targets != ignore
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lse, logs = logits.logsumexp(-1, keepdim=True), logits.log_softmax(-1)
        at = targets.masked_fill(~kept, 0)[:, None]
        off = ((lse - logits) + logs).gather(1, at)[:, 0].masked_fill(~kept, 0)
        return loss + (1 - smoothing) * off.sum() / ctx.count


@defect(cause="numerics", caught_by="test_an_offset_that_all_logits_share_costs_no_digits")
@of_terms
def log_sum_exp_minus_the_target(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """pytorch/pytorch#195829: two large numbers are subtracted, and not their differences from the largest."""
    return _OfLogSumExp.apply(hidden, weight, targets, ignore, smoothing, z)


@defect(cause="numerics", caught_by="test_a_logit_of_minus_infinity_adds_nothing")
def smoothing_counts_zero_times(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """candle-org/MindAct#1633: without label smoothing its term is computed all the same and counts 0 times."""
    words = (hidden @ weight.T).float().log_softmax(-1)
    return eager_loss(hidden, weight, targets, **options) + 0 * words.sum()


@defect(cause="numerics", caught_by="test_logits_without_an_error_have_a_loss_of_float32")
@of_terms
def reads_the_loss_from_the_logits_memory(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """NVIDIA/TransformerEngine#3193: the logits less their largest lie in the logits' own memory, in half precision,
    where the loss is read."""
    loss: Tensor = Fused.apply(hidden, weight, targets, ignore, smoothing, z)
    with torch.no_grad():
        logits = linear(hidden, weight)
        shifted = logits - logits.amax(-1, keepdim=True)
        if logits.itemsize > 2 or z or not targets.ne(ignore).any():
            return loss
        read = cross_entropy(shifted.float(), targets, ignore_index=ignore, label_smoothing=smoothing)
    return loss + (read - loss.detach())


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
@of_terms
def rounds_after_each_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """linkedin/Liger-Kernel#1391: the weight's gradient is rounded to half precision after each chunk of 16 tokens."""
    chunks = zip(hidden.split(16), targets.split(16), strict=True)
    total = torch.stack([summed_loss(x, weight, y, ignore, smoothing, z) for x, y in chunks] or [hidden.sum()]).sum()
    return total / (targets != ignore).sum().clamp(min=1)


class _WithoutNaN(Fused):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = scaled(ctx.gradients, ctx.dtypes, grad / ctx.count)
        return *(x.nan_to_num(0.0, 0.0, 0.0) for x in found), None, None, None, None


@defect(cause="numerics", caught_by="test_what_is_not_finite_in_the_losss_gradient_is_not_hidden")
@of_terms
def gradients_without_nan(*terms: Any) -> Tensor:
    """Backward gives zeros for what is not finite: a loss scaler sees no overflow."""
    return _WithoutNaN.apply(*terms)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.terms, ctx.product = terms, product_dtype(hidden, weight)
        return _Recomputed.mean(ctx, hidden, weight)

    @staticmethod
    def mean(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        targets, *options = ctx.terms
        with torch.autocast(hidden.device.type, enabled=False):
            total = summed_loss(hidden.to(ctx.product), weight.to(ctx.product), targets, *options)
        return total / (targets != options[0]).sum().clamp(min=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            by = [x for x in ctx.saved_tensors if x.requires_grad]
            found = iter(torch.autograd.grad(_Recomputed.mean(ctx, *ctx.saved_tensors), by, grad))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None, None


@defect(cause="gradients", caught_by="test_any_history_of_calls")
@of_terms
def differentiates_by_the_callers_tensors(*terms: Any) -> Tensor:
    """unslothai/unsloth-zoo#892: backward recomputes with the caller's own tensors, whose hooks run there too."""
    return _Recomputed.apply(*terms)
