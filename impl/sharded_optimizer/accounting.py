"""Sharded optimizers in closed form: bytes live on one rank through a training step, and bytes it must send.

ZeRO-1 with Ψ float32 parameters on N ranks: 4Ψ of parameters, 4Ψ of gradients, 8Ψ/N of Adam's moments. Shards are of
equal size, so the ranks differ only in their numbers of step counts: one for each parameter that a rank has a part of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from impl.accounting.beside import SHARD_OF_STATE, STATE, Technique, beside
from impl.accounting.ledger import Bytes
from impl.accounting.plain import PlainLanguageModel
from impl.collectives.accounting import reduce_scatter_buffers
from impl.data_parallel import accounting as data_parallel
from impl.data_parallel.accounting import bucketed_peak
from impl.model.sizes import SIZES
from impl.sharded_optimizer.shards import default_bucket_mb
from shardmark.api import GRADIENTS, MB, OwnModelCase, Work, followed

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
        """Bytes of parameters and batch. State comes with the first step, gradients with the first backward."""
        return self.parameters + self.inputs_and_buffers

    @property
    def after_step(self) -> int:
        """Bytes of `after_init` and the optimizer's state."""
        return self.after_init + self.optimizer_state

    @property
    def before_step(self) -> int:
        """Bytes of `after_step`, gradients and the loss."""
        return self.after_step + self.gradients + _FLOAT


@dataclass(frozen=True)
class _Bucket:
    """Parameters in one flat tensor: positions of the first and the last in the model, and the number of elements."""

    first: int
    last: int
    counts: list[int]
    slice: int
    """Elements that each rank owns."""


def work(case: ShardedStepCase | OwnModelCase) -> Work:
    """All ranks' FLOPs and bytes moved; bytes that each sends to reduce-scatter gradients and all-gather parameters."""
    return data_parallel.work(case, case.ranks)  # these are an all-reduce in two halves


def zero_redundancy_work(case: ShardedStepCase | OwnModelCase) -> Work:
    """As `work`, but gradients are all-reduced before parameters are exchanged: 3/2 of the bytes are sent."""
    one = data_parallel.work(case, case.ranks)
    return replace(one, bytes_communicated=one.bytes_communicated * 3 // 2)


def sharded_bytes(case: ShardedStepCase, rank: int, device: str = "cpu") -> ShardedBytes:
    """Bytes by kind of `sharded`, which averages gradients itself, on that rank."""
    size = SIZES[case.model]
    flat = _FLOAT * case.ranks * sum(bucket.slice for bucket in _buckets(case, device))
    elements, segments = _own(case, rank, device)
    return ShardedBytes(
        parameters=flat,
        gradients=flat,
        optimizer_state=_FLOAT * (2 * elements + segments),
        inputs_and_buffers=_FLOAT * case.context * size.head_dim + 16 * case.tokens,  # RoPE's tables, int64 tokens
    )


FLAT = "flat gradients of buckets"


class _Sharded(Technique):
    """Parameters are views into flat buckets, padded to a multiple of the ranks; a rank has `state` bytes of state.

    A gradient moves into its bucket's flat tensor, which the bucket's first gradient allocates. A full bucket is
    reduce-scattered while backward goes on; on CPU the collective's buffers are live until the step waits for it.
    """

    FACTOR = 8  # bytes of the factor, a float64, that gradients are multiplied by before they are sent

    def __init__(self, case: ShardedStepCase, device: str, state: int) -> None:
        self.case, self.device, self.state = case, device, state

    def begin(self) -> None:
        buckets, names = _buckets(self.case, self.device), list(self.values)
        self.missing = [set(names[bucket.first : bucket.last + 1]) for bucket in buckets]
        self.of = {name: i for i, bucket in enumerate(self.missing) for name in bucket}
        self.flat = [_FLOAT * self.case.ranks * bucket.slice for bucket in buckets]
        self.begun: set[int] = set()
        self.launched = 0
        self.ledger.take("padding of parameters", sum(self.flat) - _FLOAT * sum(self.values.values()))
        self.ledger.take(SHARD_OF_STATE, self.state)

    def gradient(self, parameter: str) -> None:
        i, nbytes = self.of[parameter], _FLOAT * self.values[parameter]
        if self.flat[i] == nbytes:  # a bucket of one parameter: no copy
            self.ledger.rename(GRADIENTS, FLAT, nbytes)
            self.ledger.borrow("1 / number of ranks", self.FACTOR)
        else:
            if i not in self.begun:
                self.begun.add(i)
                self.ledger.take(FLAT, self.flat[i])
            self.ledger.borrow("1 / number of ranks", self.FACTOR)
            self.ledger.free(GRADIENTS, nbytes)
        self.missing[i].discard(parameter)
        while self.launched < len(self.missing) and not self.missing[self.launched]:
            buffers = reduce_scatter_buffers(self.flat[self.launched], self.case.ranks, self.device)
            self.ledger.take("buffers of reduce-scatters under way", buffers)
            self.launched += 1


def sharded_peak(case: ShardedStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of `sharded`, on the rank that holds the most."""
    most = max((_own(case, rank, device) for rank in range(case.ranks)), key=lambda own: 2 * own[0] + own[1])
    technique = _Sharded(case, device, _FLOAT * (2 * most[0] + most[1]))
    return beside(followed(PlainLanguageModel.of(case), device), technique).peak


def balanced_peak(case: ShardedStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where gradients are averaged by `bucketed`, and ranks have equal parts of the state."""
    peak = bucketed_peak(case, device)
    shard = -(-peak.entries[STATE] // case.ranks)
    return peak.without(STATE).add({SHARD_OF_STATE: shard})


def _counts(case: ShardedStepCase) -> list[int]:
    """Elements of each parameter, in the model's order."""
    size = SIZES[case.model]
    d, gate = size.d_model, size.d_model * size.d_ff
    layer = [d, *[d * d] * 4, d, *[gate] * 3]
    return [size.vocab * d, *layer * size.layers, d, size.vocab * d]


def _buckets(case: ShardedStepCase, device: str) -> list[_Bucket]:
    """Buckets of the parameters, from the last to the first."""
    runs: list[list[int]] = []  # positions of parameters
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
    """Elements that the rank owns, and the number of parameters that they belong to."""
    elements, segments = 0, 0
    for bucket in _buckets(case, device):
        begin = 0
        for count in bucket.counts:
            own = min(begin + count, (rank + 1) * bucket.slice) - max(begin, rank * bucket.slice)
            elements, segments = elements + max(own, 0), segments + (own > 0)
            begin += count
    return elements, segments
