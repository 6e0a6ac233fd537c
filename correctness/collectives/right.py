"""Right collectives that work in unusual ways: the tests must accept them."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import AfterOnce, Done, Group, Pending
from correctness.support.planting import right


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


@right("gathers everything and sums in rank order, in float64; what is asynchronous is done at once")
class GathersAndSums:
    @staticmethod
    @torch.no_grad()
    def all_reduce(tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor, group=group)
        tensor.copy_(torch.stack([_wide(each) for each in everyone]).sum(0))
        return Done() if async_op else None

    @staticmethod
    def reduce_scatter(output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        total = input.clone()
        GathersAndSums.all_reduce(total, group)
        output.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)] if total.numel() else output)
        return Done() if async_op else None

    @staticmethod
    def all_gather(output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        everyone = [torch.empty_like(input) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, input.clone(), group=group)
        output.copy_(torch.cat(everyone).view_as(output))
        return Done() if async_op else None


@right("communicates at once, and sums in wait()")
class SumsInWait(GathersAndSums):
    @staticmethod
    @torch.no_grad()
    def all_reduce(tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        handle = dist.all_gather(everyone, tensor, group=group, async_op=True)
        in_wait = AfterOnce(handle, lambda: tensor.detach().copy_(torch.stack([_wide(x) for x in everyone]).sum(0)))
        return in_wait if async_op else in_wait.wait()


@right("reduces to the group's first rank and broadcasts from there; refuses tensors that require a gradient")
class ThroughTheFirstRank:
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.requires_grad:
            raise RuntimeError("all_reduce takes no tensor that requires a gradient")
        dist.reduce(tensor, group=group, group_dst=0)
        return dist.broadcast(tensor, group=group, group_src=0, async_op=async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        total = input.clone()
        dist.reduce(total, group=group, group_dst=0)
        parts = [part.contiguous() for part in total.view(dist.get_world_size(group), -1)]
        mine = torch.empty_like(parts[0])
        dist.scatter(mine, parts if dist.get_rank(group) == 0 else None, group=group, group_src=0)
        output.copy_(mine.view_as(output))
        return Done() if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        for rank, part in enumerate(output.view(dist.get_world_size(group), -1)):
            part.copy_(input.reshape(-1) if rank == dist.get_rank(group) else part)
            dist.broadcast(part, group=group, group_src=rank)
        return Done() if async_op else None


@right("runs everything of a group on one thread, in the order in which it was started")
class OnOneThread:
    def __init__(self) -> None:
        self.threads: weakref.WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = weakref.WeakKeyDictionary()

    def _run(self, async_op: bool, function: Any, *args: Any, group: Group) -> Any:
        thread = self.threads.setdefault(group or dist.group.WORLD, ThreadPoolExecutor(1))
        pending = Pending(thread.submit(function, *args, group=group))
        return pending if async_op else pending.wait()

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self._run(async_op, dist.all_reduce, tensor.detach(), group=group)

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self._run(async_op, dist.reduce_scatter_tensor, output, input, group=group)

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self._run(async_op, dist.all_gather_into_tensor, output, input, group=group)


@right("exchanges parts all to all, adds them, and gathers the sums")
class AllToAll:
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        ranks, flat = dist.get_world_size(group), tensor.detach().view(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))
        part = padded.new_empty(padded.numel() // ranks)
        self.reduce_scatter(part, padded, group)
        self.all_gather(padded, part, group)
        flat.copy_(padded[: flat.numel()])
        return Done() if async_op else None

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        received = torch.empty_like(input).view(-1)
        dist.all_to_all_single(received, input.reshape(-1), group=group)
        output.copy_(_wide(received.view(dist.get_world_size(group), -1)).sum(0).view_as(output))
        return Done() if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        copies = input.reshape(1, -1).repeat(dist.get_world_size(group), 1).view(-1)
        dist.all_to_all_single(output.view(-1), copies, group=group)
        return Done() if async_op else None
