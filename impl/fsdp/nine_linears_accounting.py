"""Our implementations' step of an MLP of square linears: bytes on one rank, FLOPs, and bytes sent.

Bytes on a rank are exact on CPU and Gloo, for a rank that has the most rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from impl.accounting.beside import FLOAT, Technique, beside
from impl.accounting.ledger import Bytes, Ledger
from impl.accounting.plain import PlainLinears
from impl.collectives.accounting import all_reduce_bytes_sent
from impl.fsdp.accounting import FullySharded
from impl.fsdp.simple_accounting import Simple
from shardmark.api import INPUTS, Work, followed

if TYPE_CHECKING:
    from impl.fsdp.cases import NineLinearsCase

SHARDED: dict[str, Callable[..., Technique]] = {
    "sharded_plain": partial(FullySharded, prefetch=0),
    "sharded": FullySharded,
    "sharded_kept": partial(FullySharded, reshard_after_forward=False),
}
"""Techniques by the names of their implementations."""

STRATEGIES = ("simple", *SHARDED)
"""Names of the implementations that have a formula."""

MODULES = {"linears": 2, "thirds": 1, "whole": 0}
"""Number of leading parts of a parameter's name that name its unit."""


def _step(case: NineLinearsCase, technique: Technique, device: str = "cpu") -> Ledger:
    return beside(followed(PlainLinears.of(case), device), technique)


def technique_of(name: str, case: NineLinearsCase, device: str = "cpu") -> Technique:
    """The technique of that name; KeyError unless it is one of `STRATEGIES`."""
    if name == "simple":
        return Simple(case.ranks)
    parts = MODULES[case.wrap]
    return SHARDED[name](
        case.ranks,
        device,
        unit_of=lambda parameter, shape: ".".join(parameter.split(".")[:parts]),
    )


def peak(case: NineLinearsCase, name: str, device: str = "cpu") -> Bytes:
    """Peak in bytes of one rank's step."""
    return _step(case, technique_of(name, case, device), device).peak


@dataclass(frozen=True)
class Formulas:
    """Closed forms of one technique: the peak of a case, and the bytes live after each stage of making its step."""

    peak: Callable[..., int]
    stages: Callable[[NineLinearsCase], dict[str, int]]


def formulas(name: str) -> Formulas:
    """The closed forms with which one of `STRATEGIES` is registered."""
    return Formulas(partial(peak, name=name), partial(stages, name=name))


def copying_peak(case: NineLinearsCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where nothing is sharded and each gradient is copied to be reduced: the budget of a user's own."""
    copies = {"copies of gradients": case.linears * linear_bytes(case)}
    return _step(case, Technique(), device).peak.add(copies)


def stages(case: NineLinearsCase, name: str) -> dict[str, int]:
    """Bytes live after each stage of making the step. After the last, gradients are live, and activations are not."""
    marks = _step(case, technique_of(name, case)).marks
    data = marks["before_step"].entries[INPUTS]
    model = data + case.linears * linear_bytes(case)
    left = marks["after_step"]
    left = left.without(*(name for name in left.entries if name.startswith("activations")))
    return {"data": data, "model": model, "wrapping": marks["before_step"], "warm-up": left}


def linear_bytes(case: NineLinearsCase) -> int:
    """Bytes of the weight and bias of one linear."""
    return FLOAT * (case.width**2 + case.width)


def work(case: NineLinearsCase, gathered_again: int) -> Work:
    """All ranks' FLOPs and least bytes, and what each rank must send.

    A linear takes three matrix products; the first one's input needs no gradient. Weights are read twice and gradients
    written; SGD reads both and writes the weights. `gathered_again` is the number of linears that are all-gathered for
    backward.
    """
    parameters = case.linears * linear_bytes(case)
    flops = 2 * case.batch * case.width**2 * (3 * case.linears - 1)
    once = all_reduce_bytes_sent(parameters, case.ranks) // 2  # a gather, or a reduction to shards
    return Work(
        flops=case.ranks * flops,
        bytes_moved=case.ranks * 6 * parameters,
        bytes_communicated=2 * once + once * gathered_again // case.linears,
        model_flops=case.ranks * flops,
    )
