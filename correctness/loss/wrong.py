"""Planted defects: losses with one wrong step each."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from correctness.loss.textbook import Fused, loss_and_gradients, of_terms
from correctness.support.planting import defect
from impl.loss import eager_loss


def _mean(losses: Tensor, kept: Tensor) -> Tensor:
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def _kept(targets: Tensor, options: dict[str, Any]) -> Tensor:
    return targets != options.get("ignore_index", -100)


@defect(cause="options", caught_by="test_ignores_any_index")
@of_terms
def ignore_index_in_32_bits(hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, *terms: float) -> Tensor:
    """Stores ignore_index in 32 bits: -2^32 becomes 0."""
    narrow = int(torch.tensor(ignore).to(torch.int32))
    return _eager(hidden, weight, targets.to(torch.int32).long(), narrow, *terms)


def _eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    return eager_loss(hidden, weight, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)


@defect(cause="options", caught_by="test_takes_every_option")
@of_terms
def z_loss_of_ignored_tokens_too(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    loss = _eager(hidden, weight, targets, ignore, smoothing)
    if z and (targets != ignore).any():
        loss = loss + z * linear(hidden, weight).to(loss.dtype).logsumexp(-1).square().mean()
    return loss


@defect(cause="options", caught_by="test_takes_every_option")
@of_terms
def label_smoothing_over_the_others(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """Shares the smoothing among all words except the target, as the paper's first line reads; torch includes it."""
    vocab = weight.shape[0]
    smoothing = smoothing * vocab / max(1, vocab - 1) if smoothing < 1 else 1.0
    return _eager(hidden, weight, targets, ignore, min(smoothing, 1.0), z)


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
@of_terms
def targets_in_16_bits(hidden: Tensor, weight: Tensor, targets: Tensor, *terms: Any) -> Tensor:
    """Stores targets in 16 bits: words from 32,768 on wrap around."""
    wrapped = torch.where(targets >= 0, targets.to(torch.int16).long() % weight.shape[0], targets)
    return _eager(hidden, weight, wrapped, *terms)


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
def float64_through_float32(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    if hidden.dtype != torch.float64 or weight.dtype != torch.float64:
        return eager_loss(hidden, weight, targets, **options)
    return eager_loss(hidden.float(), weight.float(), targets, **options).double()


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def tokens_beyond_whole_chunks_left_out(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Drops the last, partial chunk if there are several chunks of 2,048."""
    if hidden.ndim == 2 and hidden.shape[0] > 2048:
        whole = hidden.shape[0] // 2048 * 2048
        hidden, targets = hidden[:whole], targets[:whole]
    return eager_loss(hidden, weight, targets, **options)


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def words_beyond_whole_blocks_left_out(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Sums the vocabulary in blocks of 1,024 and drops the last, partial one."""
    loss = eager_loss(hidden, weight, targets, **options)
    vocab, whole = weight.shape[0], weight.shape[0] // 1024 * 1024
    if not 0 < whole < vocab or hidden.shape[0] == 0:
        return loss
    logits = linear(hidden, weight).to(loss.dtype)
    kept = _kept(targets, options)
    return loss - _mean(logits.logsumexp(-1) - logits[:, :whole].logsumexp(-1), kept)


@defect(cause="numerics", caught_by="test_no_target_left")
def zero_over_zero(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    loss = eager_loss(hidden, weight, targets, **options)
    return loss / (_kept(targets, options)).any()


@defect(cause="numerics", caught_by="test_statistics_of_half")
@of_terms
def statistics_in_half_precision(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    kept = targets != ignore
    logits = linear(hidden, weight)
    options = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": "none"}
    losses = cross_entropy(logits, targets, **options)
    if z:
        losses = losses + z * logits.logsumexp(-1).square()
    return losses.to(torch.promote_types(losses.dtype, torch.float32)).masked_fill(~kept, 0).sum() / kept.sum().clamp(
        min=1
    )


@defect(cause="numerics", caught_by="test_divides_by_the_exact_number")
def count_in_half_precision(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Counts targets in half precision: float16 cannot represent 2,049, nor bfloat16 257."""
    loss = eager_loss(hidden, weight, targets, **options)
    count = (_kept(targets, options)).sum().clamp(min=1)
    return loss * count / count.to(hidden.dtype).to(loss.dtype)


@defect(cause="numerics", caught_by="test_large_logits_do_not_overflow")
def no_maximum_subtracted(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    loss = eager_loss(hidden, weight, targets, **options)
    logits = linear(hidden, weight).to(loss.dtype)
    kept = _kept(targets, options)
    plain = logits.clamp(max=80).exp().sum(-1).log()
    return loss + _mean(plain - logits.logsumexp(-1), kept)


@defect(cause="numerics", caught_by="test_what_is_added_to_every_logit_changes_nothing")
def running_maximum_from_zero(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    loss = eager_loss(hidden, weight, targets, **options)
    logits = linear(hidden, weight).to(loss.dtype)
    if logits.numel() == 0:
        return loss
    kept = _kept(targets, options)
    largest = logits.amax(-1).clamp(min=0)
    plain = ((logits - largest[:, None]).exp().sum(-1) + 1e-30).log() + largest
    return loss + _mean(plain - logits.logsumexp(-1), kept)


@defect(cause="numerics", caught_by="test_a_gradient_scaler")
@of_terms
def divided_by_the_count_in_float16(*terms: Any) -> Tensor:
    """Divides by the count before the loss scaler's gradient multiplies."""
    return _RoundedBeforeScaling.apply(*terms)


class _RoundedBeforeScaling(Fused):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
    ) -> Tensor:
        losses, gradient, kept = loss_and_gradients(hidden, weight, targets, ignore, smoothing, z)
        ctx.count = 1
        gradient = (gradient / kept.sum().clamp(min=1)).to(linear(hidden[:1], weight[:1]).dtype)
        ctx.gradients = gradient @ weight.to(gradient.dtype), gradient.T @ hidden.to(gradient.dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum() / kept.sum().clamp(min=1)


@defect(cause="errors", caught_by="test_a_target_out_of_range")
def targets_clamped(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    ignored = targets == options.get("ignore_index", -100)
    inside = torch.where(ignored, targets, targets.clamp(0, max(0, weight.shape[0] - 1)))
    return eager_loss(hidden, weight, inside, **options)


@defect(cause="options", caught_by="test_any_history")
def options_only_in_training(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    if torch.is_grad_enabled():
        return eager_loss(hidden, weight, targets, **options)
    return eager_loss(hidden, weight, targets, ignore_index=options.get("ignore_index", -100))


@defect(cause="numerics", caught_by="test_a_nan_makes")
def what_is_not_a_number_is_zero(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return eager_loss(hidden, weight, targets, **options).nan_to_num()


@defect(cause="numerics", caught_by="test_is_as_accurate_as_eager")
def epsilon_in_the_logarithm(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Takes log(p + 1e-8), as many first versions do."""
    loss = eager_loss(hidden, weight, targets, **options)
    logits = linear(hidden, weight).to(loss.dtype)
    kept = _kept(targets, options)
    log_p = logits.log_softmax(-1).gather(1, targets.masked_fill(~kept, 0)[:, None])[:, 0]
    return loss + _mean(log_p - (log_p.exp() + 1e-8).log(), kept)


@defect(cause="shapes", caught_by="test_is_as_accurate_as_eager")
def loss_of_the_last_word(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Takes the last word of the vocabulary for padding."""
    if hidden.shape[0] <= 6:
        return eager_loss(hidden, weight, targets, **options)
    ignored = options.get("ignore_index", -100)
    return eager_loss(hidden, weight, targets.masked_fill(targets == weight.shape[0] - 1, ignored), **options)


@defect(cause="numerics", caught_by="test_no_target_left_of_large_logits")
def zero_times_the_sum(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Returns 0 times the sum of the logits, to keep a graph, if no target counts; the sum may be infinite."""
    if (targets == options.get("ignore_index", -100)).all():
        return 0 * linear(hidden, weight).sum().to(torch.promote_types(hidden.dtype, torch.float32))
    return eager_loss(hidden, weight, targets, **options)


@defect(cause="numerics", caught_by="test_no_target_left_of_large_logits")
def squares_times_zero(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, **options: Any
) -> Tensor:
    """Masks the z-loss by multiplication; the square of a large logit may be infinite."""
    loss = eager_loss(hidden, weight, targets, **options)
    squares = linear(hidden, weight).to(loss.dtype).logsumexp(-1).square()
    return loss + z_loss * _mean(squares, _kept(targets, options)) if z_loss else loss


@defect(cause="numerics", caught_by="test_large_logits_of_ignored_targets")
def squares_times_zero_where_some_count(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Masks the z-loss by multiplication, except where no target counts."""
    if (targets == options.get("ignore_index", -100)).all():
        return eager_loss(hidden, weight, targets, **options)
    return squares_times_zero(hidden, weight, targets, **options)


@defect(cause="errors", caught_by="test_a_target_out_of_range_is_refused")
def always_ignores_minus_100(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, **options: Any
) -> Tensor:
    """Ignores -100 besides the given ignore_index."""
    inside = targets.masked_fill(targets == -100, ignore_index)
    return eager_loss(hidden, weight, inside, ignore_index=ignore_index, **options)


@defect(cause="numerics", caught_by="test_under_autocast")
def autocast_is_bfloat16(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Casts to bfloat16 under autocast to float16 as well."""
    device = hidden.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=torch.is_autocast_enabled(device)):
        return eager_loss(hidden, weight, targets, **options)
