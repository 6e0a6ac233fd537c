"""Sharded optimizers in closed form: bytes live on one rank through a training step, and bytes it must send.

ZeRO-1 with Ψ float32 parameters on N ranks: 4Ψ of parameters, 4Ψ of gradients, 8Ψ/N of Adam's moments. Shards are of
equal size, so the ranks differ only in the step counts of the parameters that they have a part of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies import COUNTS, STATE
from impl.accounting.strategies.sharded import ShardedOptimizer
from impl.data_parallel import accounting as data_parallel
from impl.data_parallel.accounting import bucketed_peak
from impl.model.sizes import SIZES
from impl.sharded_optimizer.shards import default_bucket_mb
from shardmark.api import MB, OwnModelCase, Work

if TYPE_CHECKING:
    from impl.sharded_optimizer.cases import ShardedStepCase


_FLOAT = 4


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


def work(case: ShardedStepCase | OwnModelCase) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send: to reduce-scatter gradients, and gather parameters."""
    return data_parallel.work(case, case.ranks)  # as much as an all-reduce, which is the one and the other


def zero_redundancy_work(case: ShardedStepCase | OwnModelCase) -> Work:
    """The same for an all-reduce of the gradients, after which the parameters are still to be exchanged."""
    one = data_parallel.work(case, case.ranks)
    return replace(one, bytes_communicated=one.bytes_communicated * 3 // 2)


def sharded_bytes(case: ShardedStepCase, rank: int, device: str = "cpu") -> ShardedBytes:
    """Of `sharded`, which averages gradients itself, on that rank."""
    size = SIZES[case.model]
    flat = _FLOAT * case.ranks * sum(bucket.slice for bucket in _buckets(case, device))
    elements, segments = _own(case, rank, device)
    return ShardedBytes(
        parameters=flat,
        gradients=flat,
        optimizer_state=_FLOAT * (2 * elements + segments),
        inputs_and_buffers=_FLOAT * case.context * size.head_dim + 16 * case.tokens,  # RoPE's tables, int64 tokens
    )


def sharded_peak(case: ShardedStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of `sharded`, on the rank that has most."""
    most = max((_own(case, rank, device) for rank in range(case.ranks)), key=lambda own: 2 * own[0] + own[1])
    places = [[*range(bucket.last, bucket.first - 1, -1)] for bucket in _buckets(case, device)]
    strategy = ShardedOptimizer(case.ranks, places, 2 * _FLOAT * most[0], _FLOAT * most[1])
    return TransformerStep(case, strategy, autocast=True, device=device).run().peak


def balanced_peak(case: ShardedStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where gradients are averaged by `bucketed`, and ranks have equal parts of the state."""
    peak = bucketed_peak(case, device)
    state = peak.entries[STATE] + peak.entries[COUNTS]
    return peak.without(STATE, COUNTS).add({"shard of the optimizer's state": -(-state // case.ranks)})


def unsharded_peak(case: ShardedStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of the whole optimizer on every rank, gradients averaged by `bucketed`."""
    return bucketed_peak(case, device)


def _counts(case: ShardedStepCase) -> list[int]:
    """Elements of each parameter, in the model's order."""
    size = SIZES[case.model]
    d, gate = size.d_model, size.d_model * size.d_ff
    layer = [d, *[d * d] * 4, d, *[gate] * 3]
    return [size.vocab * d, *layer * size.layers, d, size.vocab * d]


def _buckets(case: ShardedStepCase, device: str) -> list[_Bucket]:
    """Of the parameters from the last to the first."""
    runs: list[list[int]] = []  # places
    counts, most = _counts(case), (case.bucket_mb or default_bucket_mb(device)) * MB
    for place in reversed(range(len(counts))):
        if not runs or _FLOAT * (sum(counts[i] for i in runs[-1]) + counts[place]) > most:
            runs.append([])
        runs[-1].append(place)
    return [
        _Bucket(run[-1], run[0], [counts[i] for i in run], -(-sum(counts[i] for i in run) // case.ranks))
        for run in runs
    ]


def _own(case: ShardedStepCase, rank: int, device: str) -> tuple[int, int]:
    """Elements that the rank owns, and how many parameters they are part of."""
    elements, segments = 0, 0
    for bucket in _buckets(case, device):
        begin = 0
        for count in bucket.counts:
            own = min(begin + count, (rank + 1) * bucket.slice) - max(begin, rank * bucket.slice)
            elements, segments = elements + max(own, 0), segments + (own > 0)
            begin += count
    return elements, segments
