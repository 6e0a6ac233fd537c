"""Each collective and message that this process starts, by whatever name.

    started = []
    with listening(lambda each, starting: started.append(each) if starting else None):
        model.finish_gradient_synchronization()

A listener stands between torch's dispatcher and the process group, so it hears of what is called from Python, from C++
(DDP's reducer) and from compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
"""What the process group's operators are called here."""


@dataclass(frozen=True)
class Communication:
    """One collective or message. `nbytes` is the larger of what goes in and what comes out, so it is the whole tensor
    of an all-gather and of a reduce-scatter. `ranks` is the size of its process group.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    ranks: int

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
"""Called with each communication and whether it is about to start; and again once it has been started."""

_listeners: list[Listener] = []
_library: torch.library.Library | None = None
_OURS = torch._C.DispatchKey.ADInplaceOrView
"""A key of every tensor that c10d has no kernel for; functional collectives reach it too, where autograd is done."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each collective and message that any thread of this process starts in the block."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for operator in NAMES:
            _library.impl(operator, _kernel(operator), "ADInplaceOrView")
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

    def kernel(*args: Any, **kwargs: Any) -> Any:
        each = described(operator, dict(zip(arguments, args, strict=False)) | kwargs)
        for listener in list(_listeners):
            listener(each, True)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_OURS)):
            result = overload(*args, **kwargs)
        for listener in list(_listeners):
            listener(each, False)
        return result

    return kernel


def described(operator: str, arguments: dict[str, Any]) -> Communication:
    """The communication that a call of this operator of the process group is."""
    tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in arguments.values()]
    nbytes = max((sum(tensor.nbytes for tensor in each) for each in tensors), default=0)
    dtype = next((each[0].dtype for each in tensors if each), torch.uint8)
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    return Communication(NAMES[operator], dtype, 0 if operator == "barrier" else nbytes, group.size())
