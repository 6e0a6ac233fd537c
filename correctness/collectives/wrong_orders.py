"""Planted defects that show only with many calls under way, or with calls in several groups."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from correctness.support.planting import defect
from impl.collectives import Ring

Group = dist.ProcessGroup | None


class _Copies:
    """A handle that copies the staged result back, once."""

    def __init__(self, handle: Any, tensor: Tensor, staged: Tensor) -> None:
        self.handle, self.tensor, self.staged, self.done = handle, tensor, staged, False

    def wait(self) -> None:
        self.handle.wait()
        if not self.done:
            self.tensor.detach().view(-1).copy_(self.staged)
        self.done = True


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
        handle = _Copies(super().all_reduce(staged, group, async_op=True), tensor, staged)
        return handle if async_op else handle.wait()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


class _Waits:
    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


@defect(cause="subgroup", caught_by="test_any_history")
class OneThreadForAllGroups(Ring):
    """Deadlocks if ranks start two groups' collectives in different orders."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = _Waits(_thread().submit(super().all_reduce, tensor, group))
        return handle if async_op else handle.wait()
