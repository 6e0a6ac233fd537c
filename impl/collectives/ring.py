"""Collectives around a ring: in each step every rank sends to the next and receives from the one before.

Reduce-scatter and all-gather take n-1 steps each; an all-reduce is one after the other.

Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.collectives.accounting import ring_peak
from impl.collectives.base import MessageCollectives, requires_gloo
from impl.collectives.cases import CollectiveCase
from impl.collectives.messages import Peers, Steps
from shardmark.api import MB, Race, register


class Ring(MessageCollectives):
    """No rank sends more than it must: (n-1)/n of the large tensor, twice that for an all-reduce."""

    def reduce_buffers(self, ranks: int) -> int:
        """Two buffers: one sum is sent while the next is received."""
        return min(2, ranks - 1)

    def reduce_scatter_steps(self, peers: Peers, output: Tensor, parts: Sequence[Tensor], buffers: Tensor) -> Steps:
        """Each part travels around the ring; every rank adds its own values, last of all the rank that keeps the
        part."""
        total = parts[peers.rank - 1]
        for step in range(1, peers.size):
            own = parts[peers.rank - 1 - step]
            received = buffers[step % len(buffers)][: own.numel()]
            yield [peers.send(total, to=peers.rank + 1), peers.receive(received, source=peers.rank - 1)]
            total = torch.add(own, received, out=received if step < peers.size - 1 else output)
        output.copy_(total)  # only a single rank needs this: its sum is its own part

    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        """Each part travels around the ring until it reaches the rank before the one it started from."""
        for step in range(peers.size - 1):
            yield [
                peers.send(parts[(peers.rank - step) % peers.size], to=peers.rank + 1),
                peers.receive(parts[(peers.rank - step - 1) % peers.size], source=peers.rank - 1),
            ]


def _gloo_reduces_to_scatter(case: CollectiveCase, device: str) -> bool:
    """True if the backend sends twice the bytes, and the tensor is so large that bytes determine the time."""
    return device == "cpu" and case.collective == "reduce_scatter" and case.size >= 10 * MB


register(
    "collectives",
    "ring",
    Ring(),
    memory=ring_peak,
    time=Race("backend", goal=1.0, applies=_gloo_reduces_to_scatter),
    requires=(requires_gloo,),
    called="the ring",
)
