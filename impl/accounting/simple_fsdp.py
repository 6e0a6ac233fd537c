"""SimpleFSDP of the MLP language model in closed form: bytes live on each rank, FLOPs, and bytes sent.

Parameters, gradients and moments are float32 shards, n / R values of n on R ranks; what is gathered, and with it every
activation, is in the case's dtype, c bytes a value; the loss is float32. Exact to the byte on CPU and Gloo in float32
where the ranks divide the model's widths; Gloo's gather holds what it gathers twice for a moment, and its
reduce-scatter copies what it reduces. In half precision the library takes scratch space, as `impl.accounting.mlp` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from impl.accounting import training_step
from impl.accounting.mlp import Ledger, StepBytes
from impl.model.mlp import MLP_SIZES
from shardmark.cases import RankRung, Work

_STORED = 4
_BYTES = {"float32": 4, "bfloat16": 2}


def stages(case: RankRung) -> dict[str, int]:
    """Bytes live after each stage of making the model: whole at first, or on meta never more than shards."""
    whole = _STORED * MLP_SIZES[case.model].parameters
    shards = whole // case.ranks
    if not case.meta:
        return {"model": whole, "data_parallel": shards}
    return {"model": 0, "data_parallel": 0, "to_empty": shards, "init_weights": shards}


GENERATOR = 5056
"""Bytes of a CPU generator's state, which is put aside while shards are drawn."""


def peak_of_stages(case: RankRung) -> int:
    """Bytes at the peak of making the model: the shards; or all of it and the first shard, the embedding's."""
    size = MLP_SIZES[case.model]
    held = max(stages(case).values())
    return held + (GENERATOR if case.meta else _STORED * size.vocab * size.dim // case.ranks)


def step_bytes(case: RankRung, reshard: bool = True) -> StepBytes:
    """Bytes live on one rank through an eager training step of that case."""
    size = MLP_SIZES[case.model]
    shards = _STORED * size.parameters // case.ranks
    steps = _STORED * (4 + 4 * size.layers)  # AdamW's counters
    after_init = shards + 16 * case.tokens  # int64 tokens and targets
    before_step = after_init + 2 * shards + steps
    ledger = Ledger()
    rank = _Rank(ledger, case, reshard)
    rank.forward()
    after_forward, peak_of_forward = ledger.live, ledger.peak
    rank.backward()
    return StepBytes(
        after_init=after_init,
        before_step=before_step,
        after_forward=before_step + after_forward,
        after_backward=before_step + ledger.live,
        peak_of_forward=before_step + peak_of_forward,
        peak_of_backward=before_step + ledger.peak,
        peak_of_first_step=after_init + max(ledger.peak, ledger.live + 2 * shards + steps),
    )


def peak(case: RankRung) -> int:
    """Bytes at the peak of an eager step; of a compiled one a bound."""
    return step_bytes(case).peak_of_backward


def work(case: RankRung) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send: gathers in forward and backward, and reductions.

    Backward gathers again what it reads: matrices and the norm's parameters, and of a checkpointed block the biases.
    """
    size, one = MLP_SIZES[case.model], training_step.work(case)
    biases = size.layers * (size.hidden + size.dim)
    again = size.parameters - size.vocab * size.dim - (0 if case.checkpointed else biases)
    gathered = _BYTES[case.dtype] * (size.parameters + again)
    reduced = _BYTES[case.reduce_dtype] * size.parameters
    return replace(
        one,
        flops=case.ranks * one.flops,
        model_flops=case.ranks * one.model_flops,
        bytes_moved=case.ranks * one.bytes_moved,
        bytes_communicated=(case.ranks - 1) * (gathered + reduced) // case.ranks,
    )


@dataclass
class _Rank:
    """One rank's step, operator by operator as eager PyTorch does it."""

    ledger: Ledger
    case: RankRung
    reshard: bool

    def __post_init__(self) -> None:
        self.size = MLP_SIZES[self.case.model]
        self.c, self.q = _BYTES[self.case.dtype], _BYTES[self.case.reduce_dtype]
        self.stream = self.c * self.case.tokens * self.size.dim
        self.hidden = self.c * self.case.tokens * self.size.hidden
        self.logits = self.case.tokens * self.size.vocab  # values: in c bytes, then in 4
        self.matrix = self.size.dim * self.size.hidden

    def gather(self, *numbers: int) -> None:
        """Parameters of so many values each, one after the other; all of them stay."""
        take, give = self.ledger.take, self.ledger.give
        for n in numbers:
            shard = self.c * n // self.case.ranks
            cast = shard if self.c != _STORED else 0
            take(cast)
            take(self.c * n)
            take(shard)
            give(shard)
            take(self.c * n)
            give(self.c * n, cast)

    def drop(self, *numbers: int) -> None:
        """Gathered parameters."""
        self.ledger.give(*(self.c * n for n in numbers))

    def reduce(self, n: int) -> None:
        """A gradient of so many values, which goes; its shard stays."""
        take, give = self.ledger.take, self.ledger.give
        cast = self.q * n if self.q != self.c else 0
        take(cast, self.q * n // self.case.ranks)
        take(self.q * n, 8 + self.q)  # the average divides by a number made for it
        give(self.q * n, 8 + self.q)
        if self.q != _STORED:
            take(_STORED * n // self.case.ranks)
            give(self.q * n // self.case.ranks)
        give(cast, self.c * n)

    def forward(self) -> None:
        """Leaves what backward needs."""
        take, give, size, c = self.ledger.take, self.ledger.give, self.size, self.c
        d, h, v, tokens = size.dim, size.hidden, size.vocab, self.case.tokens
        checkpointed = self.case.checkpointed
        kept_in_blocks = not (self.reshard or checkpointed)
        self.gather(v * d)
        take(self.stream)
        self.drop(v * d)
        for _ in range(size.layers):
            self.gather(self.matrix, h)
            take(self.hidden)
            self.drop(h, 0 if kept_in_blocks else self.matrix)
            take(self.hidden)  # gelu
            give(self.hidden if checkpointed else 0)
            self.gather(self.matrix, d)
            take(self.stream)
            self.drop(d, 0 if kept_in_blocks else self.matrix)
            give(self.hidden if checkpointed else 0)
            take(self.stream)  # the sum
            give(self.stream)
        self.gather(d, d)
        take(self.stream, 2 * c * tokens)  # norm, means and deviations
        self.drop(2 * d if self.reshard else 0)
        self.gather(v * d)
        take(c * self.logits)
        self.drop(v * d if self.reshard else 0)
        if c != _STORED:
            take(_STORED * self.logits)
            give(c * self.logits)
        take(_STORED * self.logits, 2 * _STORED)  # log-probabilities, the loss and the number of targets
        give(_STORED * self.logits)

    def backward(self) -> None:
        """Leaves the gradients' shards."""
        take, give, size, c = self.ledger.take, self.ledger.give, self.size, self.c
        d, v, tokens = size.dim, size.vocab, self.case.tokens
        take(_STORED)  # the loss's own gradient
        take(_STORED * self.logits)
        give(_STORED)
        take(_STORED * self.logits)
        give(2 * _STORED * self.logits)
        if c != _STORED:
            take(c * self.logits)
            give(_STORED * self.logits)

        self.gather(v * d if self.reshard else 0)
        take(c * v * d, self.stream)  # gradients of the output projection and of the norm's result
        self.drop(v * d)
        give(c * self.logits, self.stream)
        self.reduce(v * d)
        self.gather(*(d, d) if self.reshard else ())
        take(self.stream, 2 * c * d)
        take(2 * c * d)
        give(2 * c * d)
        self.drop(2 * d)
        give(2 * self.stream, 2 * c * tokens)
        self.reduce(d)
        self.reduce(d)
        for _ in range(size.layers):
            self._block_backward()
        take(c * v * d)  # the embedding's
        give(self.stream)
        self.reduce(v * d)
        give(_STORED)

    def _block_backward(self) -> None:
        take, give, c, d, h = self.ledger.take, self.ledger.give, self.c, self.size.dim, self.size.hidden
        checkpointed, again = self.case.checkpointed, self.reshard and not self.case.checkpointed
        if checkpointed:  # forward once more, up to the second product, of which nothing but its inputs is kept
            self.gather(self.matrix, h)
            take(self.hidden)
            self.drop(h)
            take(self.hidden)
            self.gather(self.matrix, d)
            self.drop(d)
        self.gather(self.matrix if again else 0)
        take(self.hidden, c * self.matrix)  # gradients of gelu's result and of W2
        self.drop(self.matrix)
        give(self.hidden if checkpointed else 0)
        take(c * d)
        give(0 if checkpointed else self.hidden)
        self.reduce(d)
        self.reduce(self.matrix)
        take(self.hidden)  # gradient of gelu's input
        give(2 * self.hidden)
        self.gather(self.matrix if again else 0)
        take(self.stream, c * self.matrix)  # gradients of the block's input and of W1
        self.drop(self.matrix)
        take(c * h)
        give(self.hidden)
        give(2 * self.stream)  # the block's input, and the gradient that was added to the one that flows past
        self.reduce(h)
        self.reduce(self.matrix)
