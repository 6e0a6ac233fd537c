"""SimpleFSDP of both language models in closed form: bytes live on each rank, FLOPs, and bytes sent.

Parameters, gradients and moments are float32 shards, n / R values of n on R ranks; what is gathered, and with it every
activation, is in the case's dtype, c bytes a value; the MLP's loss is float32. Exact to the byte on CPU and Gloo in
float32 where the ranks divide the model's widths; Gloo's gather holds what it gathers twice for a moment, and its
reduce-scatter copies what it reduces. In half precision the library takes scratch space, as
`impl.accounting.programs.mlp` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.accounting.programs.mlp import StepBytes
from impl.accounting.programs.parameters import BYTES, FLOAT, Parameter
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies import GRADIENTS, Strategy
from impl.accounting.unnamed import Unnamed, by_rows
from impl.model.mlp import MLP_SIZES
from impl.training_step import accounting as training_step
from shardmark.api import Work

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase, RankRung


def stages(case: RankRung) -> dict[str, int]:
    """Bytes live after each stage of making the model: whole at first, or on meta never more than shards."""
    whole = FLOAT * MLP_SIZES[case.model].parameters
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
    return held + (GENERATOR if case.meta else FLOAT * size.vocab * size.dim // case.ranks)


def step_bytes(case: RankRung, reshard: bool = True) -> StepBytes:
    """Bytes live on one rank through an eager training step of that case."""
    size = MLP_SIZES[case.model]
    shards = FLOAT * size.parameters // case.ranks
    steps = FLOAT * (4 + 4 * size.layers)  # AdamW's counters
    after_init = shards + 16 * case.tokens  # int64 tokens and targets
    before_step = after_init + 2 * shards + steps
    ledger = Unnamed()
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
    gathered = BYTES[case.dtype] * (size.parameters + again)
    reduced = BYTES[case.reduce_dtype] * size.parameters
    return replace(
        one,
        flops=case.ranks * one.flops,
        model_flops=case.ranks * one.model_flops,
        bytes_moved=case.ranks * one.bytes_moved,
        bytes_communicated=(case.ranks - 1) * (gathered + reduced) // case.ranks,
    )


class Simple(Strategy):
    """Every read gathers a parameter, rows over the ranks, and backward again."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def take_parameters(self) -> None:
        self.own = Unnamed(self.ledger)
        self.shards = Shards(self.own, self.ranks, self.step.c, FLOAT)
        shards = sum(self.shards.stored(parameter.shape) for unit in self.units for parameter in unit)
        self.ledger.take("shard of parameters", shards)
        self.take_moments("shard of exp_avg and exp_avg_sq", shards)

    def read(self, parameter: Parameter) -> None:
        self.shards.gather(parameter.shape)

    def drop(self, parameter: Parameter) -> None:
        self.shards.drop(parameter.shape)

    def gradient(self, parameter: Parameter) -> None:
        self.ledger.rename(GRADIENTS, self.own.name, self.step.c * parameter.values)
        self.shards.reduce(parameter.shape)


def transformer_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Bytes at the peak of an eager step of the transformer, on a rank that has the most rows."""
    return TransformerStep(case, Simple(case.ranks), device=device).run().peak


@dataclass(frozen=True)
class Shards:
    """What collectives of one parameter, rows over the ranks, take and give: gathered in c bytes, reduced in q."""

    ledger: Unnamed
    ranks: int
    c: int
    q: int

    def stored(self, parameter: tuple[int, ...]) -> int:
        """Bytes of one rank's shard."""
        return FLOAT * by_rows(parameter, self.ranks) // self.ranks

    def gather(self, *parameters: tuple[int, ...]) -> None:
        """The whole of each, one after the other; all of them stay."""
        take, give = self.ledger.take, self.ledger.give
        for parameter in parameters:
            whole = self.c * by_rows(parameter, self.ranks)
            shard = whole // self.ranks
            cast = shard if self.c != FLOAT else 0
            take(cast)
            if self.ranks > 1:
                take(whole)
                take(shard)
                give(shard)
                take(whole)
                give(whole, cast)

    def drop(self, *parameters: tuple[int, ...]) -> None:
        """What was gathered; on one rank in float32 it is what is stored."""
        if self.ranks > 1 or self.c != FLOAT:
            self.ledger.give(*(self.c * by_rows(parameter, self.ranks) for parameter in parameters))

    def reduce(self, parameter: tuple[int, ...]) -> None:
        """A gradient, which goes; its shard stays. Where rows are uneven, the shards of ranks that have fewer, or none,
        are padded first, and all are copied."""
        take, give, c, q = self.ledger.take, self.ledger.give, self.c, self.q
        gradient, whole = math.prod(parameter), q * by_rows(parameter, self.ranks)
        shard = whole // self.ranks
        cast = q * gradient if q != c else 0
        take(cast)
        if self.ranks == 1:  # as it is
            give(c * gradient if cast else 0)
            return
        rows = by_rows(parameter[:1], self.ranks) // self.ranks
        short = self.ranks - parameter[0] // rows
        uneven = whole + short * shard if short else 0
        take(uneven)
        take(shard)
        take(whole)
        give(whole, uneven)
        if q != FLOAT:
            take(FLOAT * shard // q)
            give(shard)
        give(cast, c * gradient)


@dataclass
class _Rank:
    """One rank's step of the MLP, operator by operator as eager PyTorch does it."""

    ledger: Unnamed
    case: RankRung
    reshard: bool

    def __post_init__(self) -> None:
        self.size = MLP_SIZES[self.case.model]
        self.c, self.q = BYTES[self.case.dtype], BYTES[self.case.reduce_dtype]
        shards = Shards(self.ledger, self.case.ranks, self.c, self.q)
        self.gather, self.drop, self.reduce = shards.gather, shards.drop, shards.reduce
        self.stream = self.c * self.case.tokens * self.size.dim
        self.hidden = self.c * self.case.tokens * self.size.hidden
        self.logits = self.case.tokens * self.size.vocab  # values: in c bytes, then in 4
        d, h, v = self.size.dim, self.size.hidden, self.size.vocab
        self.table, self.up, self.down = (v, d), (h, d), (d, h)
        self.narrow, self.wide = (d,), (h,)  # biases, and the norm's parameters

    def forward(self) -> None:
        """Leaves what backward needs."""
        take, give, size, c = self.ledger.take, self.ledger.give, self.size, self.c
        tokens, checkpointed = self.case.tokens, self.case.checkpointed
        kept_in_blocks = not (self.reshard or checkpointed)
        self.gather(self.table)
        take(self.stream)
        self.drop(self.table)
        for _ in range(size.layers):
            self.gather(self.up, self.wide)
            take(self.hidden)
            self.drop(self.wide, *[] if kept_in_blocks else [self.up])
            take(self.hidden)  # gelu
            give(self.hidden if checkpointed else 0)
            self.gather(self.down, self.narrow)
            take(self.stream)
            self.drop(self.narrow, *[] if kept_in_blocks else [self.down])
            give(self.hidden if checkpointed else 0)
            take(self.stream)  # the sum
            give(self.stream)
        self.gather(self.narrow, self.narrow)
        take(self.stream, 2 * c * tokens)  # norm, means and deviations
        self.drop(*[self.narrow, self.narrow] if self.reshard else [])
        self.gather(self.table)
        take(c * self.logits)
        self.drop(*[self.table] if self.reshard else [])
        if c != FLOAT:
            take(FLOAT * self.logits)
            give(c * self.logits)
        take(FLOAT * self.logits, 2 * FLOAT)  # log-probabilities, the loss and the number of targets
        give(FLOAT * self.logits)

    def backward(self) -> None:
        """Leaves the gradients' shards."""
        take, give, size, c = self.ledger.take, self.ledger.give, self.size, self.c
        d, v, tokens = size.dim, size.vocab, self.case.tokens
        take(FLOAT)  # the loss's own gradient
        take(FLOAT * self.logits)
        give(FLOAT)
        take(FLOAT * self.logits)
        give(2 * FLOAT * self.logits)
        if c != FLOAT:
            take(c * self.logits)
            give(FLOAT * self.logits)

        self.gather(*[self.table] if self.reshard else [])
        take(c * v * d, self.stream)  # gradients of the output projection and of the norm's result
        self.drop(self.table)
        give(c * self.logits, self.stream)
        self.reduce(self.table)
        self.gather(*[self.narrow, self.narrow] if self.reshard else [])
        take(self.stream, 2 * c * d)
        take(2 * c * d)
        give(2 * c * d)
        self.drop(self.narrow, self.narrow)
        give(2 * self.stream, 2 * c * tokens)
        self.reduce(self.narrow)
        self.reduce(self.narrow)
        for _ in range(size.layers):
            self._block_backward()
        take(c * v * d)  # the embedding's
        give(self.stream)
        self.reduce(self.table)
        give(FLOAT)

    def _block_backward(self) -> None:
        take, give, c, d, h = self.ledger.take, self.ledger.give, self.c, self.size.dim, self.size.hidden
        checkpointed, again = self.case.checkpointed, self.reshard and not self.case.checkpointed
        if checkpointed:  # forward once more, up to the second product, of which nothing but its inputs is kept
            self.gather(self.up, self.wide)
            take(self.hidden)
            self.drop(self.wide)
            take(self.hidden)
            self.gather(self.down, self.narrow)
            self.drop(self.narrow)
        self.gather(*[self.down] if again else [])
        take(self.hidden, c * d * h)  # gradients of gelu's result and of W2
        self.drop(self.down)
        give(self.hidden if checkpointed else 0)
        take(c * d)
        give(0 if checkpointed else self.hidden)
        self.reduce(self.narrow)
        self.reduce(self.down)
        take(self.hidden)  # gradient of gelu's input
        give(2 * self.hidden)
        self.gather(*[self.up] if again else [])
        take(self.stream, c * d * h)  # gradients of the block's input and of W1
        self.drop(self.up)
        take(c * h)
        give(self.hidden)
        give(2 * self.stream)  # the block's input, and the gradient that was added to the one that flows past
        self.reduce(self.wide)
        self.reduce(self.up)
