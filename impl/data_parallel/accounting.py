"""Data parallelism in closed form: bytes at the peak of one rank's training step, and bytes it must send.

Each peak is the largest of a few moments: when backward begins, with every activation and the logits' gradients; when
it leaves the output projection; and when the gradients are all there, with the copies of them that are communicated.
"""

from __future__ import annotations

import math
from dataclasses import replace

from impl.accounting.model import training_bytes, training_work
from impl.collectives.accounting import all_reduce_bytes_sent
from impl.data_parallel.cases import ReductionCase
from impl.training_step.cases import TrainingStepCase
from shardmark.grid import MB, Work


def work(case: TrainingStepCase, ranks: int) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send to average its gradients."""
    one = training_work(case)
    gradients = training_bytes(case).parameters
    if isinstance(case, ReductionCase):
        gradients = gradients * case.reduce_bytes // 4
    return replace(
        one,
        flops=ranks * one.flops,
        model_flops=ranks * one.model_flops,
        bytes_moved=ranks * one.bytes_moved,
        bytes_communicated=all_reduce_bytes_sent(gradients, ranks),
    )


def naive_peak(case: TrainingStepCase) -> int:
    """Peak in bytes when gradients are reduced in place."""
    step = training_bytes(case)
    return max(step.peak_at_loss, step.peak_at_output, step.peak_at_feed_forward, step.peak_at_embedding)


overlapped_peak = naive_peak


def flat_peak(case: TrainingStepCase) -> int:
    """Peak in bytes when all gradients are copied into one tensor after backward."""
    step = training_bytes(case)
    divisor = 8  # the number of ranks, an int64
    return max(naive_peak(case), step.after_backward + step.parameters + divisor)


def bucketed_peak(case: TrainingStepCase) -> int:
    """Peak in bytes when gradients live in buckets that exist from the start; the last to come is the embedding's.

    A narrower reduction adds a copy of what is on its way, from its launch until the step has all of it: everything
    once backward is done; before that nothing where one bucket has room for all, else at most what has come.
    """
    step = training_bytes(case)
    feed_forward = step.peak_at_feed_forward - step.before_feed_forward
    before_embedding = step.peak_at_embedding - step.parameters + step.embedding
    copy = case.reduce_bytes / 4 if isinstance(case, ReductionCase) else 0  # of a gradient's bytes
    early = copy if step.parameters > MB else 0
    return step.parameters + max(
        step.peak_at_loss,
        step.peak_at_output,
        feed_forward + int(early * step.before_feed_forward),
        before_embedding + int(early * (step.parameters - step.embedding)),
        step.after_backward - step.parameters + int(copy * step.parameters),
    )


def ddp_peak(case: TrainingStepCase) -> int:
    """Peak in bytes of torch DDP, whose buckets exist from the start."""
    return naive_peak(case) + training_bytes(case).parameters


def exposed_seconds(gradient_bytes: int, bucket_bytes: float, overhead: float, bandwidth: float) -> float:
    """What communication adds to a step in n equal buckets, n o + (s / n) / w: their overheads, and the last bucket's
    time on the link, which no computation is left to hide.

    `overhead` is in seconds an all-reduce; `bandwidth` in bytes of the tensor a second.
    """
    return gradient_bytes / bucket_bytes * overhead + bucket_bytes / bandwidth


def best_bucket_bytes(gradient_bytes: int, overhead: float, bandwidth: float) -> float:
    """Where `exposed_seconds` is least: n = sqrt(s / (w o)), so s / n = sqrt(s w o)."""
    return math.sqrt(gradient_bytes * bandwidth * overhead)
