"""Collectives by direct exchange: every rank sends to every other at once, in one step, or two to all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import direct_peak
from impl.collectives.base import MessageCollectives, flat, requires_gloo
from impl.collectives.messages import Peers, Steps
from impl.collectives.worker import WorkerWork
from shardmark.registry import Race, register


class Direct(MessageCollectives):
    """As many bytes as a ring, at one latency where the ring has n-1, with n-1 buffers where it has two.

    Two ranks all-reduce in one step: each sends all it has, which is no more than halves there and back.
    """

    def reduce_rows(self, ranks: int) -> int:
        """One for each of the other ranks."""
        return ranks - 1

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerWork | None:
        """Replace `tensor`, of any shape, by its sum over the ranks."""
        peers = Peers(group)
        if peers.size != 2:
            return super().all_reduce(tensor, group, async_op=async_op)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            (mine,) = parts
            theirs = buffers[0][: mine.numel()]
            yield [peers.send(mine, to=peers.rank + 1), peers.receive(theirs, of=peers.rank + 1)]
            mine.add_(theirs)

        return peers.run(steps, [flat(tensor)], 1, async_op)

    def reduce_scatter_steps(self, peers: Peers, output: Tensor, parts: Sequence[Tensor], buffers: Tensor) -> Steps:
        """Each rank's part of everyone to that rank, which adds them up."""
        others = _others(peers)
        mine = parts[peers.rank]
        received = [buffer[: mine.numel()] for buffer in buffers]
        yield [peers.send(parts[rank], to=rank) for rank in others] + [
            peers.receive(buffer, of=rank) for rank, buffer in zip(others, received, strict=True)
        ]
        output.copy_(mine)
        for theirs in received:
            output.add_(theirs)

    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        """Each rank's part to everyone."""
        yield [peers.send(parts[peers.rank], to=rank) for rank in _others(peers)] + [
            peers.receive(parts[rank], of=rank) for rank in _others(peers)
        ]


def _others(peers: Peers) -> list[int]:
    """The other ranks, the next one first, so that not all of them send to the same one first."""
    return [(peers.rank + step) % peers.size for step in range(1, peers.size)]


register("collectives", "direct", Direct(), memory=direct_peak, time=Race("backend"), requires=(requires_gloo,))
