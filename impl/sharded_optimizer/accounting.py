"""Sharded optimizers in closed form: bytes live on one rank through a training step, and bytes it must send.

ZeRO-1 with Ψ float32 parameters on N ranks: 4Ψ of parameters, 4Ψ of gradients, 8Ψ/N of Adam's moments. Shards are of
equal size, so the ranks differ only in the step counts of the parameters that they have a part of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from impl.accounting.model import training_bytes
from impl.collectives.accounting import reduce_scatter_buffers
from impl.data_parallel import accounting as data_parallel
from impl.data_parallel.accounting import bucketed_peak, ddp_peak
from impl.model.sizes import SIZES
from impl.sharded_optimizer.shards import BUCKET_MB, IN_FLIGHT
from shardmark.grid import MB, Work

if TYPE_CHECKING:
    from impl.sharded_optimizer.cases import ShardedStepCase


_FLOAT = 4
_FACTOR = 8
"""Bytes of the number that gradients are multiplied by on their way, a float64."""


@dataclass(frozen=True)
class ShardedBytes:
    """Bytes live on one rank between the phases of a step, by kind."""

    parameters: int
    gradients: int
    optimizer_state: int
    inputs_and_buffers: int

    @property
    def after_init(self) -> int:
        """Parameters, and the batch: state comes with the first step, gradients with the first backward."""
        return self.parameters + self.inputs_and_buffers

    @property
    def after_step(self) -> int:
        """And the state."""
        return self.after_init + self.optimizer_state

    @property
    def before_step(self) -> int:
        """And gradients, and the loss."""
        return self.after_step + self.gradients + _FLOAT


@dataclass(frozen=True)
class _Bucket:
    """Parameters in one flat tensor: the first and last of them by their place in the model, and elements."""

    first: int
    last: int
    counts: list[int]
    slice: int
    """Elements that each rank owns."""


def work(case: ShardedStepCase) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send: to reduce-scatter gradients, and gather parameters."""
    return data_parallel.work(case, case.ranks)  # as much as an all-reduce, which is the one and the other


def zero_redundancy_work(case: ShardedStepCase) -> Work:
    """The same for an all-reduce of the gradients, after which the parameters are still to be exchanged."""
    one = data_parallel.work(case, case.ranks)
    return replace(one, bytes_communicated=one.bytes_communicated * 3 // 2)


def sharded_bytes(case: ShardedStepCase, rank: int) -> ShardedBytes:
    """Of `sharded`, which averages gradients itself, on that rank."""
    step = training_bytes(case)
    flat = _flat_bytes(case, _buckets(case))
    elements, segments = _own(case, rank)
    return ShardedBytes(
        parameters=flat,
        gradients=flat,
        optimizer_state=_FLOAT * (2 * elements + segments),
        inputs_and_buffers=step.after_init - step.parameters,
    )


def sharded_peak(case: ShardedStepCase) -> int:
    """Peak in bytes of `sharded`, on the rank that has most.

    Gradients move into flat buckets, each of which exists from the first of its gradients to the end of the step.
    """
    step = training_bytes(case)
    buckets = _buckets(case)
    head = [bucket for bucket in buckets if bucket.last >= len(_counts(case)) - 2]  # output projection, final norm
    filled = [bucket for bucket in head if bucket.first >= len(_counts(case)) - 2]
    begun = buckets if buckets[-1].last > 0 else buckets[:-1]  # before the embedding's gradient comes
    logits = _FLOAT * case.tokens * SIZES[case.model].vocab
    feed_forward = step.peak_at_feed_forward - step.before_feed_forward
    flat = _flat_bytes(case, buckets)
    after_backward, before_embedding = step.after_backward + _FLOAT, step.peak_at_embedding + step.embedding
    moments = (
        step.peak_at_loss,
        step.peak_at_output,
        step.after_forward - logits + _flat_bytes(case, head[:1]) + _copied(case, buckets[0]) + _FACTOR,
        feed_forward + _flat_bytes(case, head) + _reducing(case, filled),
        before_embedding - step.parameters + _flat_bytes(case, begun) + _reducing(case, buckets[:-1]),
        after_backward - step.parameters + flat + _copied(case, buckets[-1]) + _FACTOR + _reducing(case, buckets[:-1]),
        after_backward - step.parameters + flat + _reducing(case, buckets),
    )
    ours = max((sharded_bytes(case, rank) for rank in range(case.ranks)), key=lambda rank: rank.optimizer_state)
    return max(moments) - step.parameters + ours.parameters - step.optimizer_state + ours.optimizer_state


def _copied(case: ShardedStepCase, bucket: _Bucket) -> int:
    """Bytes of a gradient as large as the embedding's while it is copied; one that fills its bucket is not."""
    return 0 if bucket.counts == [case.ranks * bucket.slice] else training_bytes(case).embedding


def _reducing(case: ShardedStepCase, buckets: list[_Bucket]) -> int:
    """Bytes of the buffers of the reduce-scatters under way once those of `buckets` have begun."""
    under_way = buckets[-IN_FLIGHT:]
    return sum(reduce_scatter_buffers(_flat_bytes(case, [bucket]), case.ranks) for bucket in under_way)


def balanced_peak(case: ShardedStepCase) -> int:
    """Peak in bytes where gradients are averaged by `bucketed`, and ranks have equal parts of the state."""
    state = training_bytes(case).optimizer_state
    return bucketed_peak(case) - state + -(-state // case.ranks)


def unsharded_peak(case: ShardedStepCase) -> int:
    """Peak in bytes of the whole optimizer on every rank, gradients averaged by `bucketed`."""
    return bucketed_peak(case)


def zero_redundancy_peak(case: ShardedStepCase) -> int:
    """Peak in bytes of `zero_redundancy` behind torch DDP, on the rank that has most.

    Whole parameters go, largest first, each to the rank that has least so far.
    """
    ranks = [(0, 0)] * case.ranks  # elements, parameters
    for count in sorted(_counts(case), reverse=True):
        least = min(range(case.ranks), key=lambda rank: ranks[rank][0])
        ranks[least] = (ranks[least][0] + count, ranks[least][1] + 1)
    most = max(_FLOAT * (2 * elements + tensors) for elements, tensors in ranks)
    return ddp_peak(case) - training_bytes(case).optimizer_state + most


def _counts(case: ShardedStepCase) -> list[int]:
    """Elements of each parameter, in the model's order."""
    size = SIZES[case.model]
    d, gate = size.d_model, size.d_model * size.d_ff
    layer = [d, *[d * d] * 4, d, *[gate] * 3]
    return [size.vocab * d, *layer * size.layers, d, size.vocab * d]


def _buckets(case: ShardedStepCase) -> list[_Bucket]:
    """Of the parameters from the last to the first."""
    runs: list[list[int]] = []  # places
    counts = _counts(case)
    for place in reversed(range(len(counts))):
        if not runs or _FLOAT * (sum(counts[i] for i in runs[-1]) + counts[place]) > BUCKET_MB * MB:
            runs.append([])
        runs[-1].append(place)
    return [
        _Bucket(run[-1], run[0], [counts[i] for i in run], -(-sum(counts[i] for i in run) // case.ranks))
        for run in runs
    ]


def _flat_bytes(case: ShardedStepCase, buckets: list[_Bucket]) -> int:
    """Of the flat tensors, with what fills them up to a multiple of the ranks."""
    return _FLOAT * case.ranks * sum(bucket.slice for bucket in buckets)


def _own(case: ShardedStepCase, rank: int) -> tuple[int, int]:
    """Elements that the rank owns, and how many parameters they are part of."""
    elements, segments = 0, 0
    for bucket in _buckets(case):
        begin = 0
        for count in bucket.counts:
            own = min(begin + count, (rank + 1) * bucket.slice) - max(begin, rank * bucket.slice)
            elements, segments = elements + max(own, 0), segments + (own > 0)
            begin += count
    return elements, segments
