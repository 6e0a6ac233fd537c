"""Data parallelism: bytes at the peak of one rank's training step, and bytes it must send."""

from __future__ import annotations

import math

from impl.accounting.beside import FLOAT, Technique, beside
from impl.accounting.ledger import Bytes
from impl.accounting.model import training_work
from impl.accounting.plain import PlainLanguageModel
from impl.collectives.accounting import all_reduce_bytes_sent, work_of_all
from impl.data_parallel.cases import ReductionCase
from impl.model.sizes import SIZES
from impl.training_step.cases import TrainingStepCase
from shardmark.api import GRADIENTS, MB, OwnModelCase, Work, followed


def work(case: TrainingStepCase | OwnModelCase, ranks: int) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send to average its gradients."""
    one = training_work(case)
    gradients = 4 * (case if isinstance(case, OwnModelCase) else SIZES[case.model]).parameters
    if isinstance(case, ReductionCase):
        gradients = gradients * case.reduce_bytes // 4
    return work_of_all(one, ranks, all_reduce_bytes_sent(gradients, ranks))


BUCKETS, REDUCED = "buckets of gradients", "gradients in the reduction's dtype"


class Flat(Technique):
    """One all-reduce: after backward, all gradients are copied into one tensor."""

    def finish(self) -> None:
        self.ledger.take("flat copy of the gradients", FLOAT * sum(self.values.values()))
        self.ledger.take("number of ranks", 8)  # an int64 tensor, the divisor of the average


class Bucketed(Technique):
    """Gradients live in buckets that exist from the start.

    If `reduce_bytes` an element are fewer than the gradients', each gradient has a copy in the narrower dtype from its
    bucket's launch until the step has waited for all. Once backward is done, every gradient has one; before that, if
    there are several buckets, at most those that have arrived.
    """

    def __init__(self, reduce_bytes: int = FLOAT) -> None:
        self.copy_bytes = reduce_bytes if reduce_bytes != FLOAT else 0

    def begin(self) -> None:
        super().begin()
        self.ledger.take(BUCKETS, FLOAT * sum(self.values.values()))
        several = FLOAT * sum(self.values.values()) > MB
        last = next(iter(self.values))  # the model's first parameter is in the last bucket
        self.late = {last} if several else set(self.values)

    def gradient(self, parameter: str) -> None:
        self.ledger.free(GRADIENTS, FLOAT * self.values[parameter])  # it was copied into its slot
        if parameter not in self.late:
            self.ledger.take(REDUCED, self.copy_bytes * self.values[parameter])

    def finish(self) -> None:
        self.ledger.take(REDUCED, self.copy_bytes * sum(self.values[each] for each in self.late))


def naive_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes when gradients are reduced in place."""
    return _peak(case, Technique(), device)


def flat_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes when all gradients are copied into one tensor after backward."""
    return _peak(case, Flat(), device)


def bucketed_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes when gradients live in buckets that exist from the start, and are reduced in the case's dtype."""
    return _peak(case, Bucketed(case.reduce_bytes) if isinstance(case, ReductionCase) else Bucketed(), device)


def copying_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes that a user's own wrapper may have: gradients, and from the start a copy of each to reduce."""
    return naive_peak(case, device).add({"copies of gradients": FLOAT * SIZES[case.model].parameters})


def _peak(case: TrainingStepCase, technique: Technique, device: str) -> Bytes:
    return beside(followed(PlainLanguageModel.of(case), device), technique).peak


def exposed_seconds(gradient_bytes: int, bucket_bytes: float, overhead: float, bandwidth: float) -> float:
    """Seconds that communication adds to a step in n equal buckets, n o + (s / n) / w: their overheads, and the last
    bucket's transfer, which no computation hides. `overhead` is in seconds per all-reduce, `bandwidth` in bytes of
    the tensor per second."""
    return gradient_bytes / bucket_bytes * overhead + bucket_bytes / bandwidth


def best_bucket_bytes(gradient_bytes: int, overhead: float, bandwidth: float) -> float:
    """Bucket size that minimizes `exposed_seconds`: n = sqrt(s / (w o)), so s / n = sqrt(s w o)."""
    return math.sqrt(gradient_bytes * bandwidth * overhead)
