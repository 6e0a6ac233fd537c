"""Collectives by direct exchange: every rank sends to every other at once. An all-reduce takes two such steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import direct_peak
from impl.collectives.base import MessageCollectives, flat, requires_gloo
from impl.collectives.messages import Peers, Steps
from impl.collectives.worker import WorkerHandle
from shardmark.api import Race, register


class Direct(MessageCollectives):
    """Sends as many bytes as a ring, in one step where the ring takes n-1, with n-1 buffers where the ring has two.

    Two ranks all-reduce in one step: each sends its full tensor, as many bytes as a half in each of two steps.
    """

    def reduce_buffers(self, ranks: int) -> int:
        return ranks - 1

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerHandle | None:
        peers = Peers(group)
        if peers.size != 2:
            return super().all_reduce(tensor, group, async_op=async_op)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            (own,) = parts
            other = buffers[0][: own.numel()]
            yield [peers.send(own, to=peers.rank + 1), peers.receive(other, source=peers.rank + 1)]
            own.add_(other)

        return peers.run(steps, [flat(tensor)], 1, async_op)

    def reduce_scatter_steps(self, peers: Peers, output: Tensor, parts: Sequence[Tensor], buffers: Tensor) -> Steps:
        """Send each rank its part; then add what the others sent to this rank's own."""
        others = _others(peers)
        own = parts[peers.rank]
        received = [buffer[: own.numel()] for buffer in buffers]
        yield [peers.send(parts[rank], to=rank) for rank in others] + [
            peers.receive(buffer, source=rank) for rank, buffer in zip(others, received, strict=True)
        ]
        output.copy_(own)
        for other in received:
            output.add_(other)

    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        """Send this rank's part to every other rank."""
        yield [peers.send(parts[peers.rank], to=rank) for rank in _others(peers)] + [
            peers.receive(parts[rank], source=rank) for rank in _others(peers)
        ]


def _others(peers: Peers) -> list[int]:
    """The other ranks, beginning with the next one, so that ranks do not all send to the same one first."""
    return [(peers.rank + step) % peers.size for step in range(1, peers.size)]


register(
    "collectives",
    "direct",
    Direct(),
    memory=direct_peak,
    time=Race("backend"),
    requires=(requires_gloo,),
    called="a direct exchange",
)
