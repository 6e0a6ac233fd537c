"""Planted defects: collectives that go wrong while others are under way, and handles that wait for the wrong thing."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import After, Done, Group, Pending, Plain, exchange, finished
from correctness.support.planting import defect

# Two calls


@defect(cause="two calls", caught_by="test_any_history")
class SharesItsBuffer(Plain):
    """ROCm/mori#93: all sums of one shape use one buffer."""

    buffers: ClassVar[dict[Any, Tensor]] = {}

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        buffer = self.buffers.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor)).detach()
        buffer.copy_(tensor.detach())
        handle = super().all_reduce(buffer, group, async_op=True)
        return finished(handle, lambda: tensor.data.copy_(buffer), async_op)


@defect(cause="two calls", caught_by="test_any_number_may_be_under_way")
class Has32Buffers(Plain):
    """Rotates among 32 buffers for sums of one shape: the 33rd under way overwrites the first."""

    turns: ClassVar[Any] = itertools.cycle(range(32))
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        buffer = self.buffers.setdefault((next(self.turns), tensor.shape, tensor.dtype), torch.empty_like(tensor))
        buffer.copy_(tensor.detach())
        handle = super().all_reduce(buffer, group, async_op=True)
        return finished(handle, lambda: tensor.data.copy_(buffer), async_op)


@defect(cause="two calls", caught_by="test_any_history")
class RemembersTheInput(Plain):
    """Caches its copy of the first input of a shape, and reuses it for later inputs."""

    parts: ClassVar[dict[Any, Tensor]] = {}

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        known = self.parts.setdefault((input.shape, input.dtype, dist.get_world_size(group)), input.clone())
        return super().reduce_scatter(output, known.clone(), group, async_op=async_op)


@defect(cause="two calls", caught_by="test_any_history")
class WaitsForTheOldest(Plain):
    """`wait` of any handle waits for the oldest call."""

    pending: ClassVar[list[Any]] = []

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        pending = self.pending
        pending.append(super().all_gather(output, input, group, async_op=True))

        class Oldest:
            def wait(self) -> None:
                pending.pop(0).wait()

        return Oldest() if async_op else Oldest().wait()


# Handles


@defect(cause="handles", caught_by="test_results_are_there_when_wait_returns")
class DoesNotWait(Plain):
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = super().all_reduce(tensor, group, async_op=True)
        return Done() if async_op else handle.wait()


@defect(cause="handles", caught_by="test_results_are_there_when_wait_returns")
class CopiesAtOnce(Plain):
    """gazingstars123/Anima-Standalone-Trainer#39: copies from the internal buffer before the result has arrived."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        buffer = torch.zeros_like(output)
        handle = super().all_gather(buffer, input, group, async_op=True)
        if not async_op:
            handle.wait()
        output.copy_(buffer)
        return handle if async_op else None


@defect(cause="handles", caught_by="test_results_are_there_when_it_returns")
class ReturnsBeforeItIsDone(Plain):
    """Waits for only one of the two halves it started."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handles = [dist.all_reduce(part, group=group, async_op=True) for part in tensor.detach().view(-1).chunk(2)]
        return handles[-1] if async_op else handles[0].wait()


@defect(cause="handles", caught_by="test_a_collective_goes_on")
class StartsInWait(Plain):
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        def start() -> Any:
            return dist.all_reduce(tensor, group=group)

        return After(Done(), start) if async_op else start()


@defect(cause="handles", caught_by="test_any_history")
class AddsAtEachWait(Plain):
    """`wait` adds what the other ranks sent; a second `wait` adds it again."""

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, own, rest = dist.get_rank(group), input.clone(), torch.empty_like(output)
        own.view(-1)[rank * output.numel() :][: output.numel()] = 0
        mine = input.detach().view(-1)[rank * output.numel() :][: output.numel()].clone()
        handle = dist.reduce_scatter_tensor(rest, own, group=group, async_op=True)
        output.copy_(mine.view(output.shape))
        return finished(handle, lambda: output.add_(rest), async_op)


@defect(cause="handles", caught_by="test_any_history")
class RunsOnThreadsOfTheirOwn(Plain):
    """ztxz16/fastllm#725: ranks pair calls as they arrive; with a thread for each call, a later one may overtake."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        late = 0.02 * (dist.get_rank(group) % 2) if tensor.numel() and tensor.view(-1)[0] == 1 else 0.0
        thread = threading.Timer(late, lambda: dist.all_reduce(tensor, group=group))
        thread.start()
        return After(Done(), thread.join) if async_op else thread.join()


@defect(cause="handles", caught_by="test_the_default_group_is_one_group_by_either_name")
class AThreadForEachNameOfAGroup(Plain):
    """A thread runs a group's calls in their order, but the default group has two names, and so two threads."""

    def __init__(self) -> None:
        self.threads: dict[Group, ThreadPoolExecutor] = {}

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        thread = self.threads.setdefault(group, ThreadPoolExecutor(1))
        pending = Pending(thread.submit(dist.all_reduce, tensor.detach(), group=group))
        return pending if async_op else pending.wait()


@defect(cause="two calls", caught_by="test_messages_of_the_callers_own_do_not_mix_with_it")
class SendsAsTheCallerDoes(Plain):
    """Sends the parts of a sum without a tag of its own, as the caller's messages are."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        passed = tensor.clone()
        for _ in range(ranks - 1):
            received = torch.empty_like(passed)
            exchange(passed, received, (rank + 1) % ranks, (rank - 1) % ranks, group)
            tensor += received
            passed = received
        return Done() if async_op else None


@defect(cause="two calls", caught_by="test_messages_of_the_callers_own_do_not_mix_with_it")
class GathersAsTheCallerSends(Plain):
    """Passes parts round the ring without a tag of its own, in all-gathers alone."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = output.detach().view(ranks, -1)
        parts[rank] = input.detach().flatten()
        for step in range(ranks - 1 if input.numel() else 0):
            sent, received = (rank - step) % ranks, (rank - step - 1) % ranks
            exchange(parts[sent], parts[received], (rank + 1) % ranks, (rank - 1) % ranks, group)
        return Done() if async_op else None
