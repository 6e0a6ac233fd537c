"""Collectives as messages between ranks. A collective is a generator that yields steps, each a list of messages:

    yield [peers.send(own, to=1), peers.receive(other, source=1)]
    own.add_(other)

It continues once the step's messages have been sent and received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch.distributed as dist
from torch import Tensor

from impl.collectives.segments import IN_FLIGHT, segments_of
from impl.collectives.worker import WorkerHandle, worker_of
from shardmark.api import Unsupported

TAG = 0x5AD
"""Tag of these messages, so that none is mistaken for one that the caller sends between the same ranks."""

GLOO_ALONE = "it sends messages from a second thread, which Gloo allows and NCCL does not"

Steps = Iterator[list[dist.P2POp]]
"""A collective, as the messages of one step after the other."""


def is_on_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether Gloo communicates the group's tensors on the CPU; another backend may have those of GPUs."""
    return "cpu:gloo" in dist.get_backend_config(group).split(",")


class Peers:
    """A process group of `size` ranks, with this process's `rank` in it, and messages to and from the others.

    Ranks wrap around: `to=rank + 1` of the last rank is rank 0.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def send(self, tensor: Tensor, to: int) -> dist.P2POp:
        """A message to a rank; `tensor` must not change until the step is over."""
        return dist.P2POp(dist.isend, tensor, group=self.group, tag=TAG, group_peer=to % self.size)

    def receive(self, tensor: Tensor, source: int) -> dist.P2POp:
        """A message from a rank; it is in `tensor` when the step is over."""
        return dist.P2POp(dist.irecv, tensor, group=self.group, tag=TAG, group_peer=source % self.size)

    def run(
        self, steps: Callable[[Sequence[Tensor], Tensor], Steps], parts: Sequence[Tensor], rows: int, async_op: bool
    ) -> WorkerHandle | None:
        """Run `steps(a segment of each part, buffers)` for each segment of the flat `parts`, on the group's worker.

        `buffers` is (rows, elements of a segment of the first part, which is the largest). Every rank cuts its parts in
        the same way, so all ranks send and receive their messages in the same order. Unsupported where it is not Gloo
        that sends them.
        """
        if parts[0].device.type != "cpu" or not is_on_gloo(self.group):
            raise Unsupported(f"tensors on {parts[0].device.type}: {GLOO_ALONE}")
        count = segments_of(parts[0].nbytes)
        segments = list(zip(*(part.tensor_split(count) for part in parts), strict=True))
        buffers = parts[0].new_empty(min(IN_FLIGHT, count), rows, segments[0][0].numel())
        pending = (steps(segment, buffers[i % IN_FLIGHT]) for i, segment in enumerate(segments))
        handle = worker_of(self.group).submit(partial(_pipeline, pending), buffers)
        del pending  # while this frame waits, it must not hold the tensors that the worker is done with
        if async_op:
            return handle
        handle.wait()
        return None


def _pipeline(segments: Iterator[Steps]) -> None:
    """Run the steps of every segment, `IN_FLIGHT` segments at a time."""
    in_flight: deque[tuple[Steps, list[dist.Work]]] = deque((steps, []) for steps in islice(segments, IN_FLIGHT))
    while in_flight:
        steps, handles = in_flight.popleft()
        for handle in handles:
            handle.wait()
        if (messages := next(steps, None)) is not None:
            in_flight.append((steps, _exchange(messages)))
        elif (following := next(segments, None)) is not None:
            in_flight.appendleft((following, []))  # in front, so that its first messages leave at once


def _exchange(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Start a step's messages, except empty ones.

    Receives are posted first: Gloo announces that it is ready to receive on the connection that it sends on, so the
    announcement would wait behind the bytes of a send.
    """
    messages = [message for message in messages if message.tensor.numel()]
    messages.sort(key=lambda message: message.op is dist.isend)
    nbytes = sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
    for counter in _counters:
        counter.nbytes += nbytes
    return dist.batch_isend_irecv(messages) if messages else []


@dataclass
class BytesSent:
    nbytes: int = 0


_counters: list[BytesSent] = []


@contextmanager
def count_bytes_sent() -> Iterator[BytesSent]:
    """Count what `Ring` and `Direct` send from this process; wait for asynchronous collectives before leaving."""
    counter = BytesSent()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
