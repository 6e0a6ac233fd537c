"""Planted defects that show only with many calls under way, or with calls in several groups."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from correctness.collectives.simple_collectives import Group, Pending, finished
from correctness.support.planting import defect
from impl.collectives import Ring


@defect(cause="two calls", caught_by="test_any_history")
class TakesEightBuffersInTurn(Ring):
    """Rotates among eight buffers: the ninth all-reduce under way overwrites the first."""

    def __init__(self) -> None:
        self.calls, self.pools = 0, {}  # type: ignore[var-annotated]

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        key = tensor.numel(), tensor.dtype
        pool = self.pools.setdefault(key, [tensor.new_empty(tensor.numel()) for _ in range(8)])
        self.calls += 1
        staged = pool[self.calls % 8].copy_(tensor.detach().view(-1))
        handle = super().all_reduce(staged, group, async_op=True)
        return finished(handle, lambda: tensor.detach().view(-1).copy_(staged), async_op, once=True)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@defect(cause="subgroup", caught_by="test_any_history")
class OneThreadForAllGroups(Ring):
    """NVIDIA/nccl#195: deadlocks if ranks start two groups' collectives in different orders."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = Pending(_thread().submit(super().all_reduce, tensor, group))
        return handle if async_op else handle.wait()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


@defect(cause="subgroup", caught_by="test_however_many_are_under_way")
class FourThreadsForAllGroups(Ring):
    """A group's collectives run one after another, and those that wait for their turn keep a thread of another's."""

    def __init__(self) -> None:
        self.turns: dict[Any, Any] = {}

    def in_turn(self, collective: Any, *tensors: Tensor, group: Group, async_op: bool) -> Any:
        before = self.turns.get(group)

        def run() -> None:
            if before is not None:
                before.result()
            collective(*tensors, group)

        self.turns[group] = _threads().submit(run)
        handle = Pending(self.turns[group])
        return handle if async_op else handle.wait()

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self.in_turn(super().all_reduce, tensor, group=group, async_op=async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self.in_turn(super().reduce_scatter, output, input, group=group, async_op=async_op)

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return self.in_turn(super().all_gather, output, input, group=group, async_op=async_op)


class _Staged:
    """A handle of a sum in a buffer, which is free once the handle is."""

    def __init__(self, tensor: Tensor, buffer: Tensor, free: list[Tensor], handle: Any) -> None:
        self.tensor, self.buffer, self.free, self.handle = tensor, buffer, free, handle

    def wait(self) -> None:
        self.handle.wait()
        self.tensor.copy_(self.buffer)
        self.wait = self.handle.wait  # type: ignore[method-assign]

    def __del__(self) -> None:
        self.free[:] = [self.buffer]


@defect(cause="handles", caught_by="test_any_history")
class FreesWithTheHandle(Ring):
    """The next sum takes the buffer of a handle that is gone, also of one that the caller dropped without a wait."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        own = tensor.detach().view(-1)
        if not 0 < len(own) <= 1000 or torch.is_inference_mode_enabled():
            return super().all_reduce(tensor, group, async_op=async_op)
        fits = [each for each in self.free if each.numel() == len(own) and each.dtype == own.dtype]
        self.free.clear()
        buffer = fits[0].copy_(own) if fits else own.clone()
        handle = _Staged(own, buffer, self.free, super().all_reduce(buffer, group, async_op=True))
        return handle if async_op else handle.wait()
