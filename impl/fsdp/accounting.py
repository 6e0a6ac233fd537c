"""Full sharding: bytes at the peak of one rank's training step, exact on CPU and Gloo, and bytes it must send.

Units are the blocks, the embedding, the output projection, and the root module with its final norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.accounting.model import training_work
from impl.accounting.programs.parameters import (
    BYTES,
    EMBEDDING,
    padded,
    transformer_units,
    values,
    with_norms_in_root,
)
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies.sharded import FullySharded, NormsReplicated
from impl.model.sizes import SIZES
from shardmark.api import OwnModelCase, Work

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase


def sharded_peak(case: FSDPCase, reshard_after_forward: bool = True, prefetch: int = 1, device: str = "cpu") -> Bytes:
    """Peak in bytes of ours; `prefetch` units are all-gathered ahead."""
    strategy = FullySharded(case.ranks, reshard_after_forward=reshard_after_forward, prefetch=prefetch)
    return TransformerStep(case, strategy, device=device).run().peak


def kept_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where units stay gathered after forward."""
    return sharded_peak(case, reshard_after_forward=False, device=device)


def plain_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes without prefetch."""
    return sharded_peak(case, prefetch=0, device=device)


def norms_replicated_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where the norms' weights are replicated."""
    return TransformerStep(case, NormsReplicated(case.ranks), device=device).run().peak


def work(case: FSDPCase | OwnModelCase, kept: bool = False, norms_replicated: bool = False) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send.

    Parameters are all-gathered for forward and, unless they are `kept`, for backward: all but the embedding's, whose
    gradient does not read it, and the root module's own. Gradients are reduced once. Each time (n-1)/n of the bytes go.
    What is replicated is not gathered, and its gradients are all-reduced, which sends as much as to gather and reduce
    once.
    """
    one = training_work(case)
    if isinstance(case, OwnModelCase):  # every unit counts as read in backward
        units, again = [case.parameters], 0 if kept else case.parameters
    else:
        parameters = transformer_units(SIZES[case.model])
        if norms_replicated:
            parameters = with_norms_in_root(parameters)
        units = [padded(values([unit]), case.ranks) for unit in parameters]
        again = 0 if kept else sum(units[EMBEDDING + 1 :])
    sent = BYTES[case.dtype] * (2 * sum(units) + again)
    return replace(
        one,
        flops=case.ranks * one.flops,
        model_flops=case.ranks * one.model_flops,
        bytes_moved=case.ranks * one.bytes_moved,
        bytes_communicated=sent * (case.ranks - 1) // case.ranks,
    )
