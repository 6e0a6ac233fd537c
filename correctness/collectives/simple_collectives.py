"""torch's own collectives, the base of planted defects, and the handles that planted ones return."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class Plain:
    """torch's own collectives; defects override single methods."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output, input, group=group, async_op=async_op)

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


class After:
    """A handle that runs a function once another handle is done, at each `wait`."""

    def __init__(self, handle: Any, then: Callable[[], Any]) -> None:
        self.handle, self.then = handle, then

    def wait(self) -> None:
        self.handle.wait()
        self.then()


class AfterOnce(After):
    """A handle whose first `wait` does the remaining work."""

    def wait(self) -> None:
        super().wait()
        self.then = lambda: None


class Pending:
    """A handle of what a thread runs."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> Any:
        return self.future.result()


def finished(handle: Any, then: Callable[[], Any], async_op: bool, once: bool = False) -> Any:
    """Wait and run `then` now, or return a handle whose `wait` does so; with `once`, its first `wait` alone."""
    after = (AfterOnce if once else After)(handle, then)
    return after if async_op else after.wait()


class Done:
    """A handle of a finished collective."""

    def wait(self) -> None:
        return None


def exchange(send: Tensor, receive: Tensor, to: int, source: int, group: Group) -> None:
    messages = [
        dist.P2POp(dist.isend, send, group=group, group_peer=to),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=source),
    ]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
