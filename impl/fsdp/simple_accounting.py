"""SimpleFSDP of both language models in closed form: bytes live on each rank, FLOPs, and bytes sent.

Parameters, gradients and moments are float32 shards, n / R values of n on R ranks. Gathered parameters and activations
are in the case's dtype; the MLP's loss is float32. The formulas are exact to the byte on CPU and Gloo in float32 where
the ranks divide the model's widths. Gloo's all-gather briefly holds its output twice, and its reduce-scatter copies its
input.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from impl.accounting.beside import BYTES, FLOAT, Technique, beside, peak_of_first_step
from impl.accounting.ledger import Bytes
from impl.accounting.plain import PlainLanguageModel
from impl.collectives.accounting import padded, work_of_all
from impl.model.mlp import MLP_SIZES
from impl.training_step import accounting as training_step
from shardmark.api import AFTER_FORWARD, BACKWARD, ENTER, GRADIENTS, READ, READ_END, Moment, Work, followed

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase, RankRung


def stages(case: RankRung) -> dict[str, int]:
    """Bytes live after each stage of making the model: all of it, then shards; from the meta device only shards."""
    whole = FLOAT * MLP_SIZES[case.model].parameters
    shards = whole // case.ranks
    if not case.meta:
        return {"model": whole, "data_parallel": shards}
    return {"model": 0, "data_parallel": 0, "to_empty": shards, "init_weights": shards}


GENERATOR = 5056
"""Bytes of a CPU generator's state, which is saved while shards are drawn."""


def peak_of_stages(case: RankRung) -> int:
    """Bytes at the peak of making the model: all of it and the first shard, the embedding's; from meta only shards."""
    size = MLP_SIZES[case.model]
    held = max(stages(case).values())
    return held + (GENERATOR if case.meta else FLOAT * size.vocab * size.dim // case.ranks)


def step_bytes(case: RankRung, reshard: bool = True) -> dict[str, Bytes]:
    """Bytes live on one rank after each part of an eager training step of that case, and at its peaks."""
    plain = PlainLanguageModel.of(case, autocast=False, checkpointed=case.checkpointed)
    technique = Simple(case.ranks, reduce_bytes=BYTES[case.reduce_dtype], reshard_after_forward=reshard)
    ledger = beside(followed(plain, "cpu"), technique)
    return {
        **ledger.marks,
        "peak_of_forward": ledger.peaks["after_forward"],
        "peak_of_backward": ledger.peak,
        "peak_of_first_step": peak_of_first_step(ledger),
    }


def peak(case: RankRung) -> Bytes:
    """Bytes at the peak of an eager step; an upper bound for a compiled one."""
    return step_bytes(case)["peak_of_backward"]


def work(case: RankRung) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send: gathers in forward and backward, and reductions.

    Backward gathers again the parameters that it reads: matrices, the norm's, and the biases of checkpointed blocks.
    """
    size, one = MLP_SIZES[case.model], training_step.work(case)
    biases = size.layers * (size.hidden + size.dim)
    again = size.parameters - size.vocab * size.dim - (0 if case.checkpointed else biases)
    gathered = BYTES[case.dtype] * (size.parameters + again)
    reduced = BYTES[case.reduce_dtype] * size.parameters
    return work_of_all(one, case.ranks, (case.ranks - 1) * (gathered + reduced) // case.ranks)


FULL, REDUCED = "full parameters", "shard of gradients"


class Simple(Technique):
    """Every read all-gathers a parameter, whose rows are sharded over the ranks. The copy that autograd saves is freed
    and all-gathered again for backward, unless `reshard_after_forward` is False or checkpointing repeats the forward.

    A gradient is reduced at `reduce_bytes` per value, and its shard is then float32.
    """

    def __init__(self, ranks: int, *, reduce_bytes: int = FLOAT, reshard_after_forward: bool = True) -> None:
        self.ranks, self.reduce_bytes, self.reshard_after_forward = ranks, reduce_bytes, reshard_after_forward

    def begin(self) -> None:
        self.forward = True
        self.reads: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        """Reads still to come, in forward (True) and in backward; a recomputed forward is part of backward."""
        self.computed_again: set[str] = set()
        """Modules whose forward runs again in backward."""
        forward = True
        for moment in self.plain.moments:
            forward = forward and moment.kind != AFTER_FORWARD
            self.reads[forward][moment.name] += moment.kind == READ
            if moment.kind == ENTER and not forward:
                self.computed_again.add(moment.name)
        self.full: set[str] = set()
        self.parameters_of: dict[str, list[str]] = {}
        for parameter in self.values:
            self.parameters_of.setdefault(_module(parameter), []).append(parameter)
        self.take_shards(sum(FLOAT * self.rows(name) // self.ranks for name in self.values))

    def rows(self, parameter: str) -> int:
        """Number of values of the parameter, with its rows padded to a multiple of the ranks."""
        rows, *columns = self.plain.parameters[parameter]
        return padded(rows, self.ranks) * prod(columns)

    def at(self, moment: Moment) -> None:
        if moment.kind == AFTER_FORWARD:
            self.forward = False
        elif moment.kind == BACKWARD:  # autograd unpacks what it saved before it multiplies
            for parameter in self.parameters_of.get(moment.name, ()):
                if self.reads[False][parameter]:
                    self.gather(parameter)
        elif moment.kind == READ:
            self.reads[self.forward][moment.name] -= 1
            self.gather(moment.name)
        elif moment.kind == READ_END and not self.kept(moment.name):
            self.drop(moment.name)
        super().at(moment)

    def kept(self, parameter: str) -> bool:
        """Whether the gathered parameter stays after this read: for a later one, or for backward."""
        again = self.reads[False][parameter] > 0
        if self.forward:
            return again and not self.reshard_after_forward and _module(parameter) not in self.computed_again
        return again

    def gather(self, parameter: str) -> None:
        """All-gather the parameter, unless it is there. On one rank in float32 its shard is the parameter."""
        if parameter in self.full or (self.ranks == 1 and self.itemsize == FLOAT):
            return
        self.full.add(parameter)
        whole = self.itemsize * self.rows(parameter)
        shard = whole // self.ranks
        cast = shard if self.itemsize != FLOAT else 0
        if self.ranks == 1:
            self.ledger.take(FULL, cast)
            return
        self.ledger.take("shard, cast", cast)
        self.ledger.take(FULL, whole)
        self.ledger.borrow("copy of a shard", shard)
        self.ledger.borrow("what Gloo gathers", whole)
        self.ledger.free("shard, cast")

    def drop(self, parameter: str) -> None:
        if parameter in self.full:
            self.full.remove(parameter)
            self.ledger.free(FULL, self.itemsize * self.rows(parameter))

    def gradient(self, parameter: str) -> None:
        """Reduce the gradient: it is freed, and this rank's shard of it stays. Where rows are uneven, shards of ranks
        with fewer rows, or none, are padded first, and all shards are copied."""
        take, free, q = self.ledger.take, self.ledger.free, self.reduce_bytes
        nbytes, whole = self.itemsize * self.values[parameter], q * self.rows(parameter)
        cast = q * self.values[parameter] if q != self.itemsize else 0
        if self.ranks == 1:  # nothing is reduced
            if cast:
                take(GRADIENTS, cast)
                free(GRADIENTS, nbytes)
            return
        shard, (count, *_) = whole // self.ranks, self.plain.parameters[parameter]
        short = self.ranks - count // -(-count // self.ranks)
        take("gradient, cast", cast)
        take("gradient, padded", whole + short * shard if short else 0)
        take(REDUCED, shard)
        self.ledger.borrow("what Gloo reduces", whole)
        free("gradient, padded")
        if q != FLOAT:
            take(REDUCED, FLOAT * shard // q)
            free(REDUCED, shard)
        free("gradient, cast")
        free(GRADIENTS, nbytes)


def _module(parameter: str) -> str:
    """Name of the parameter's module."""
    return parameter.rpartition(".")[0]


def transformer_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Bytes at the peak of an eager step of the transformer, on a rank that has the most rows."""
    plain = PlainLanguageModel.of(case, autocast=False)
    return beside(followed(plain, device), Simple(case.ranks)).peak
