"""Collectives and messages that this process starts, and the bytes that it sends over TCP.

    started = []
    with listening(lambda each, starting: started.append(each) if starting else None):
        model.finish_gradient_synchronization()

A listener stands between torch's dispatcher and the process group. So it sees what Python, C++ (DDP's reducer),
DTensor's operators and compiled code start.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils._pytree import tree_leaves

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "barrier": "barrier",
}
"""Our name for each operator of the process group."""


@dataclass(frozen=True)
class Communication:
    """One collective or message of `nbytes` bytes: the larger of its input and its output, so the whole tensor of an
    all-gather and of a reduce-scatter. `ranks` is the size of its process group, and `group` has their numbers, as far
    as PyTorch knows them.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    ranks: int
    group: tuple[int, ...] = field(default=(), compare=False)

    @property
    def sent(self) -> int:
        """Bytes that each rank must send, on average over the ranks: 2(n-1)/n of `nbytes` for an all-reduce, (n-1)/n
        for any other collective, all of them for the sender of a message."""
        if self.name in ("send", "receive"):
            return self.nbytes if self.name == "send" else 0
        return (2 if self.name == "all_reduce" else 1) * (self.ranks - 1) * self.nbytes // self.ranks

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes of {str(self.dtype).removeprefix('torch.')} on {self.ranks} ranks"


Listener = Callable[[Communication, bool], None]
"""Called with each communication twice: with True before it starts, with False after."""

_listeners: list[Listener] = []
_library: torch.library.Library | None = None
_TCP_INFO_BYTES_SENT = 200
"""Where `tcpi_bytes_sent` and `tcpi_bytes_retrans` (Linux 4.19) lie in the kernel's struct tcp_info."""
_OURS = torch._C.DispatchKey.BackendSelect
"""The last dispatch key before the device's own, which every call has and c10d has no kernel for. DTensor's
collectives inside an operator pass by all keys of autograd, which are done with by then."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each collective and message that any thread of this process starts in the block.

    The first block replaces PyTorch's operators and the last one brings them back; the dispatcher, which has no lock,
    must not call one of them then. So no other thread may communicate while a block begins or ends, but in another.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for operator in NAMES:
            _library.impl(operator, _kernel(operator), "BackendSelect", with_keyset=True)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _library._destroy()
            _library = None


def _kernel(operator: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    arguments = [argument.name for argument in overload._schema.arguments]

    below = torch._C._dispatch_keyset_full_after(_OURS)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        each = described(operator, dict(zip(arguments, args, strict=False)) | kwargs)
        for listener in list(_listeners):
            listener(each, True)
        result = overload.redispatch(keys & below, *args, **kwargs)
        for listener in list(_listeners):
            listener(each, False)
        return result

    return kernel


def described(operator: str, arguments: dict[str, Any]) -> Communication:
    """The communication that a call of this process-group operator starts."""
    tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in arguments.values()]
    nbytes = max((sum(tensor.nbytes for tensor in each) for each in tensors), default=0)
    dtype = next((each[0].dtype for each in tensors if each), torch.uint8)
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    ranks = tuple(_world.pg_group_ranks.get(group, ()))
    return Communication(NAMES[operator], dtype, 0 if operator == "barrier" else nbytes, group.size(), ranks)


def tcp_bytes_sent() -> int:
    """Payload bytes sent over all open connections of this process; a retransmission is not counted again."""
    return sum(map(_bytes_sent, os.listdir("/proc/self/fd")))


def _bytes_sent(descriptor: str) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(int(descriptor))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, sent_again = struct.unpack_from("QQ", info, _TCP_INFO_BYTES_SENT)
            return sent - sent_again
    except OSError:  # closed in the meantime, or no TCP
        return 0
