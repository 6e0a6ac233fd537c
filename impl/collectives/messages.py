"""Collectives as messages between ranks: a collective is a generator of steps, each the messages it sends and receives.

yield [peers.send(mine, to=1), peers.receive(theirs, of=1)]
mine.add_(theirs)  # what a step receives is there when the generator goes on
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
from impl.collectives.worker import WorkerWork, worker_of

TAG = 0x5AD
"""Of our messages, so that none of them meets one of the caller's own between the same ranks."""

Steps = Iterator[list[dist.P2POp]]
"""The messages of each step of a collective, in turn."""


class Peers:
    """This rank's place among the `size` ranks of a process group, and messages to and from the others."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def send(self, tensor: Tensor, to: int) -> dist.P2POp:
        """A message; `tensor` stays as it is until the step is over."""
        return dist.P2POp(dist.isend, tensor, group=self.group, tag=TAG, group_peer=to % self.size)

    def receive(self, tensor: Tensor, of: int) -> dist.P2POp:
        """A message that is in `tensor` when the step is over."""
        return dist.P2POp(dist.irecv, tensor, group=self.group, tag=TAG, group_peer=of % self.size)

    def run(
        self, steps: Callable[[Sequence[Tensor], Tensor], Steps], parts: Sequence[Tensor], rows: int, async_op: bool
    ) -> WorkerWork | None:
        """Run `steps(segment of each part, buffers)` for one segment of the flat `parts` after the other.

        `buffers` are `rows` tensors as large as a segment of the first part, which is the largest. Every rank cuts its
        parts alike, and so meets the others' messages in the order they were sent.
        """
        count = segments_of(parts[0].nbytes)
        segments = list(zip(*(part.tensor_split(count) for part in parts), strict=True))
        buffers = parts[0].new_empty(min(IN_FLIGHT, count), rows, segments[0][0].numel())
        cut = (steps(segment, buffers[i % IN_FLIGHT]) for i, segment in enumerate(segments))
        work = worker_of(self.group).submit(partial(_pipeline, cut), buffers)
        del cut  # or, waiting here, this frame would outlive the worker's hold on the tensors
        if async_op:
            return work
        work.wait()
        return None


def _pipeline(segments: Iterator[Steps]) -> None:
    """Take every segment through its steps, `IN_FLIGHT` of them side by side."""
    under_way: deque[tuple[Steps, list[dist.Work]]] = deque((steps, []) for steps in islice(segments, IN_FLIGHT))
    while under_way:
        steps, works = under_way.popleft()
        for work in works:
            work.wait()
        if (messages := next(steps, None)) is not None:
            under_way.append((steps, _exchange(messages)))
        elif (following := next(segments, None)) is not None:
            under_way.appendleft((following, []))  # it is its turn at once


def _exchange(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Begin a step's messages; those that would be empty are not sent.

    Receiving comes first: Gloo's word that a rank is ready would else wait behind the bytes that it sends.
    """
    messages = [message for message in messages if message.tensor.numel()]
    messages.sort(key=lambda message: message.op is dist.isend)
    nbytes = sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
    for counter in _counters:
        counter.nbytes += nbytes
    return dist.batch_isend_irecv(messages) if messages else []


@dataclass
class BytesSent:
    """What this process's collectives have sent."""

    nbytes: int = 0


_counters: list[BytesSent] = []


@contextmanager
def count_bytes_sent() -> Iterator[BytesSent]:
    """Count what the collectives of this package send, in this process; those under way are to be waited for."""
    counter = BytesSent()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
